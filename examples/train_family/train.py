"""Trains the bundled family: `python -m examples.train_family.train --data DIR --work DIR`.

Stages, each a share of the wall-clock budget `--minutes`:

1. `together`: the target learns from the text; the smaller generalists learn from the target's
   current distribution on the same batch. The teacher's forward is paid for once, and the
   students follow it to the end of its learning-rate schedule.
2. one stage per student, the target standing still: each learns its final distribution, half
   on the text, half on what the target itself goes on with after some of it (`own_text.py`),
   since that is what a drafter meets when it serves. Total variation joins the loss, since it is
   what acceptance depends on. The specialists begin as copies of the smallest generalist and
   learn on one domain.

Schedules follow the wall clock, so a slow machine trains less, not longer. The run keeps a
checkpoint and goes on from it; at the end it writes `WORK/models/<name>` in bfloat16.
Not here: evaluation (`card.py`).
"""

import argparse
import copy
import json
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaForCausalLM

from examples.train_family.corpus import DOMAINS, VOCAB_SIZE, Corpus, load_corpus
from examples.train_family.own_text import WINDOW, load_own_text
from modelpool.fast.cpu import computes_in

logger = logging.getLogger(__name__)

TARGET = "tiny-8m"
MIDDLE = "tiny-3m"
SMALL = "tiny-1m"
SPECIALISTS = {"tiny-1m-code": "code", "tiny-1m-math": "math"}
MIX = {"code": 0.42, "prose": 0.38, "math": 0.20}

# name -> hidden size, layers, MLP size, query heads, key/value heads; all heads are 32 wide.
SHAPES = {
    TARGET: (256, 9, 736, 8, 2),
    MIDDLE: (160, 7, 448, 5, 1),
    SMALL: (96, 3, 256, 3, 1),
}
LEARNING_RATE = {TARGET: 2.5e-3, MIDDLE: 3e-3, SMALL: 4e-3}


@dataclass(frozen=True)
class Stage:
    name: str
    minutes: float
    students: tuple[str, ...]
    teacher_learns: bool
    window: int  # tokens in a training window
    domain: str | None = None  # None: the mix


@dataclass
class Progress:
    """What a checkpoint holds beside weights and optimizer states."""

    stage: int = 0
    seconds: float = 0.0  # spent in the current stage
    steps: int = 0
    tokens: dict[str, int] = field(default_factory=dict)  # seen, per model


def build(name: str, eos_token_id: int) -> LlamaForCausalLM:
    hidden, layers, mlp, heads, kv_heads = SHAPES[name]
    torch.manual_seed(len(name) + layers)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCAB_SIZE,
            hidden_size=hidden,
            num_hidden_layers=layers,
            intermediate_size=mlp,
            num_attention_heads=heads,
            num_key_value_heads=kv_heads,
            head_dim=32,
            max_position_embeddings=2048,
            tie_word_embeddings=True,
            bos_token_id=eos_token_id,
            eos_token_id=eos_token_id,
            pad_token_id=eos_token_id,
        )
    )


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


def sample_batch(
    arrays: dict[str, NDArray[np.uint16]],
    stage: Stage,
    tokens: int,
    rng: np.random.Generator,
    step: int = 1,
) -> tuple[Tensor, Tensor]:
    """Random windows of `arrays`, by domain, that begin at multiples of `step`.

    Returns inputs and next tokens, both [B, window].
    """
    domains = rng.choice(DOMAINS, size=tokens // stage.window, p=[MIX[d] for d in DOMAINS])
    rows = []
    for domain in domains:
        array = arrays[stage.domain or str(domain)]
        start = step * rng.integers(0, (len(array) - stage.window - 1) // step + 1)
        rows.append(array[start : start + stage.window + 1].astype(np.int64))
    batch = torch.from_numpy(np.stack(rows))
    return batch[:, :-1], batch[:, 1:]


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


def logits_of(model: LlamaForCausalLM, inputs: Tensor) -> Tensor:
    is_emulated = inputs.device.type == "cpu" and not computes_in("bfloat16")
    with torch.autocast(inputs.device.type, torch.bfloat16, enabled=not is_emulated):
        logits: Tensor = model(input_ids=inputs, use_cache=False).logits
    return logits.flatten(0, 1)  # [B * window, V]


class Trainer:
    def __init__(self, corpus: Corpus, work_dir: Path, stages: list[Stage], tokens: int) -> None:
        self.corpus = corpus
        self.work_dir = work_dir
        self.stages = stages
        self.batch_tokens = tokens
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        self.progress = Progress()
        self._own: dict[str, NDArray[np.uint16]] | None = None
        self.models = {
            name: build(name, corpus.tokenizer.eos_token_id).to(self.device)  # type: ignore[arg-type]
            for name in SHAPES
        }
        self.optimizers = {n: Optimizer(m, LEARNING_RATE[n]) for n, m in self.models.items()}
        self._checkpoint = work_dir / "checkpoint.pt"
        if self._checkpoint.exists():
            self._load()

    def run(self) -> None:
        while self.progress.stage < len(self.stages):
            stage = self.stages[self.progress.stage]
            if self.progress.seconds == 0:
                self._prepare(stage)
            self._run_stage(stage)
            self.progress.stage += 1
            self.progress.seconds = 0.0
            self._save()

    def _prepare(self, stage: Stage) -> None:
        for name in stage.students:
            if name in SPECIALISTS:
                self.models[name] = copy.deepcopy(self.models[SMALL])
                self.progress.tokens[name] = self.progress.tokens.get(SMALL, 0)
        if not stage.teacher_learns:  # a new stage is a new schedule, from a lower peak
            self._own_text()  # made outside the stage's time
            for name in stage.students:
                base = LEARNING_RATE[SMALL if name in SPECIALISTS else name]
                self.optimizers[name] = Optimizer(self.models[name], base / 2)

    def _run_stage(self, stage: Stage) -> None:
        rng = np.random.default_rng([self.progress.stage, self.progress.steps])
        budget_s = stage.minutes * 60
        saved = reported = time.monotonic()
        while self.progress.seconds < budget_s:
            started = time.monotonic()
            losses = self._step(stage, rng, self.progress.seconds / budget_s)
            now = time.monotonic()
            self.progress.seconds += now - started
            self.progress.steps += 1
            if now - reported > 20:
                reported = now
                self._report(stage, budget_s, losses)
            if now - saved > 180:
                saved = now
                self._save()

    def _step(self, stage: Stage, rng: np.random.Generator, progress: float) -> dict[str, float]:
        own = not stage.teacher_learns and self.progress.steps % 2 == 1
        if own:
            batch = sample_batch(self._own_text(), stage, self.batch_tokens, rng, step=WINDOW)
        else:
            batch = sample_batch(self.corpus.train, stage, self.batch_tokens, rng)
        inputs, labels = batch
        inputs, labels = inputs.to(self.device), labels.to(self.device)
        scale = learning_rate_scale(progress)
        losses: dict[str, float] = {}
        with torch.set_grad_enabled(stage.teacher_learns):
            teacher = logits_of(self.models[TARGET], inputs)
            cross_entropy = F.cross_entropy(teacher.float(), labels.flatten())
        losses[TARGET] = cross_entropy.item()
        if stage.teacher_learns:
            cross_entropy.backward()  # type: ignore[no-untyped-call]
            self._update(TARGET, scale, labels.numel())
        teacher = teacher.detach()
        for name in stage.students:
            student = logits_of(self.models[name], inputs)
            loss = distillation_loss(student, teacher, with_tv=not stage.teacher_learns)
            loss.backward()  # type: ignore[no-untyped-call]
            losses[name] = loss.item()
            self._update(name, scale, labels.numel())
        return losses

    def _own_text(self) -> dict[str, NDArray[np.uint16]]:
        if self._own is None:
            self._own = load_own_text(self.models[TARGET], self.corpus, self.work_dir)
        return self._own

    def _update(self, name: str, scale: float, tokens: int) -> None:
        torch.nn.utils.clip_grad_norm_(self.models[name].parameters(), 1.0)
        self.optimizers[name].step(scale)
        self.progress.tokens[name] = self.progress.tokens.get(name, 0) + tokens

    def _report(self, stage: Stage, budget_s: float, losses: dict[str, float]) -> None:
        shown = "  ".join(f"{name} {loss:.3f}" for name, loss in losses.items())
        done = self.progress.seconds / budget_s
        logger.info("%s %3.0f%%  step %d  %s", stage.name, 100 * done, self.progress.steps, shown)

    def _save(self) -> None:
        state = {
            "progress": vars(self.progress),
            "models": {n: m.state_dict() for n, m in self.models.items()},
            "optimizers": {n: o.state_dict() for n, o in self.optimizers.items()},
        }
        scratch = self._checkpoint.with_suffix(".new")
        torch.save(state, scratch)
        scratch.replace(self._checkpoint)  # never a half-written checkpoint

    def _load(self) -> None:
        state = torch.load(self._checkpoint, map_location=self.device, weights_only=True)
        self.progress = Progress(**state["progress"])
        for name in state["models"]:
            if name in SPECIALISTS:
                self.models[name] = copy.deepcopy(self.models[SMALL])
                self.optimizers[name] = Optimizer(self.models[name], LEARNING_RATE[SMALL])
            self.models[name].load_state_dict(state["models"][name])
        for name, own in state["optimizers"].items():
            self.optimizers[name].load_state_dict(own)
        logger.info("resumed in stage %d at step %d", self.progress.stage, self.progress.steps)

    def export(self) -> None:
        for name, model in self.models.items():
            folder = self.work_dir / "models" / name
            copy.deepcopy(model).to("cpu", torch.bfloat16).save_pretrained(folder)
            self.corpus.tokenizer.save_pretrained(folder)
        tokens = json.dumps(self.progress.tokens, indent=1)
        (self.work_dir / "models" / "tokens_seen.json").write_text(tokens + "\n")


def make_stages(minutes: float) -> list[Stage]:
    def frozen(name: str, share: float, domain: str | None = None) -> Stage:
        return Stage(name, share * minutes, (name,), False, WINDOW - 1, domain)

    return [
        Stage("together", 0.6 * minutes, (MIDDLE, SMALL), teacher_learns=True, window=256),
        frozen(SMALL, 0.15),
        *(frozen(name, 0.07, domain) for name, domain in SPECIALISTS.items()),
        frozen(MIDDLE, 0.11),
    ]


def main(configure_logging: Callable[[], None]) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--data", type=Path, required=True, help="folder with the training text")
    parser.add_argument("--work", type=Path, required=True, help="checkpoints and results")
    parser.add_argument("--minutes", type=float, default=75.0, help="wall-clock budget")
    parser.add_argument("--batch-tokens", type=int, default=4096)
    args = parser.parse_args()
    configure_logging()
    args.work.mkdir(parents=True, exist_ok=True)
    corpus = load_corpus(args.data, args.work)
    trainer = Trainer(corpus, args.work, make_stages(args.minutes), args.batch_tokens)
    trainer.run()
    trainer.export()


if __name__ == "__main__":
    main(lambda: logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s"))
