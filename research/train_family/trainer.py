"""Trainer: runs the stages, keeps a checkpoint and goes on from it, and exports the models."""

import copy
import json
import logging
import time
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F
from transformers import LlamaForCausalLM

from modelpool.fast.cpu import computes_in
from research.train_family.corpus import DOMAINS, Corpus
from research.train_family.family import (
    LEARNING_RATE,
    MIX,
    SHAPES,
    SMALL,
    SPECIALISTS,
    TARGET,
    build,
)
from research.train_family.learning import Optimizer, distillation_loss, learning_rate_scale
from research.train_family.own_text import WINDOW, load_own_text

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
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


def sample_batch(
    arrays: dict[str, NDArray[np.uint16]],
    stage: Stage,
    tokens: int,
    rng: np.random.Generator,
    step: int,
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
            _ = self._own_text  # made outside the stage's time
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
        arrays, step = (self._own_text, WINDOW) if own else (self.corpus.train, 1)
        inputs, labels = sample_batch(arrays, stage, self.batch_tokens, rng, step)
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

    @cached_property
    def _own_text(self) -> dict[str, NDArray[np.uint16]]:
        return load_own_text(self.models[TARGET], self.corpus, self.work_dir)

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
