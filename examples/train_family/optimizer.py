"""Optimizer: Muon and AdamW together, and the schedule of their learning rate."""

from typing import Any

import torch
from transformers import LlamaForCausalLM


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
