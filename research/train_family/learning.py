"""What a model learns by: a drafter's loss (the target's distribution, KL and total variation), the
optimizer, Muon and AdamW together, and the schedule of its learning rate.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import LlamaForCausalLM


class _Distillation(torch.autograd.Function):
    """KL(teacher || student) up to the teacher's entropy, plus total variation if asked.

    The gradient is worked out beside the loss, some rows at a time: over thousands of rows of
    the vocabulary's width, autograd's own takes as long as the small student's layers.
    """

    ROWS = 128  # of 4,096 float32: what a core's cache holds

    @staticmethod
    def forward(ctx: Any, student: Tensor, teacher: Tensor, with_tv: bool) -> Tensor:
        total = student.new_zeros((), dtype=torch.float32)
        gradient = torch.empty_like(student)
        for first in range(0, len(student), _Distillation.ROWS):
            rows = slice(first, first + _Distillation.ROWS)
            log_q = F.log_softmax(student[rows].float(), dim=-1)
            p = F.softmax(teacher[rows].float(), dim=-1)
            total -= (p * log_q).sum()
            q = log_q.exp_()
            slope = q - p
            if with_tv:
                total += 0.5 * slope.abs().sum()
                sign = slope.sign()
                slope += 0.5 * q * (sign - (q * sign).sum(-1, keepdim=True))
            gradient[rows] = slope
        ctx.save_for_backward(gradient.div_(len(student)))
        return total / len(student)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None, None]:
        (gradient,) = ctx.saved_tensors
        return gradient * grad_outputs[0], None, None


def distillation_loss(student: Tensor, teacher: Tensor, with_tv: bool) -> Tensor:
    """KL(teacher || student), plus their total variation if asked. Logits [N, V] -> scalar."""
    loss: Tensor = _Distillation.apply(student, teacher, with_tv)  # type: ignore[no-untyped-call]
    return loss


class Optimizer:
    """Muon for the matrices inside the layers, AdamW for embeddings and norms."""

    def __init__(self, model: LlamaForCausalLM, learning_rate: float) -> None:
        matrices = [p for n, p in model.named_parameters() if p.ndim == 2 and "embed" not in n]
        taken = {id(p) for p in matrices}
        others = [p for p in model.parameters() if id(p) not in taken]
        self.learning_rate = learning_rate
        self._parts: list[torch.optim.Optimizer] = [
            torch.optim.Muon(
                matrices, lr=learning_rate, weight_decay=0.05, adjust_lr_fn="match_rms_adamw"
            ),
            torch.optim.AdamW(others, lr=learning_rate, betas=(0.9, 0.97), weight_decay=0.0),
        ]

    def step(self, scale: float) -> None:
        for part in self._parts:
            for group in part.param_groups:
                group["lr"] = self.learning_rate * scale
            part.step()
            part.zero_grad(set_to_none=True)

    def state_dict(self) -> dict[str, Any]:
        parts = [part.state_dict() for part in self._parts]
        return {"learning_rate": self.learning_rate, "parts": parts}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.learning_rate = state["learning_rate"]
        for part, own in zip(self._parts, state["parts"], strict=True):
            part.load_state_dict(own)


def learning_rate_scale(progress: float) -> float:
    """Linear warm-up over 3% of the stage, constant to one half, then linear to zero."""
    return min(1.0, progress / 0.03 + 0.02, max(0.0, (1.0 - progress) / 0.5))
