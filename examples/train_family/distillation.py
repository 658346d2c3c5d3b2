"""The loss that a drafter learns by: the target's distribution, KL and total variation."""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F


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
