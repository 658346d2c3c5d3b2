"""`transformers` `generate` on the target's checkpoint, alone and with an assistant.

In a process of its own: two pools of OpenMP threads in one process slow each other down.
"""

import functools
import multiprocessing
import time
from collections.abc import Sequence
from concurrent.futures import Executor, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from typing import Any

import torch
import transformers

from specrouter.bench.contenders import MeasurementError
from specrouter.bench.figures import Sample, distinct_share
from specrouter.bench.prompts import Work


@dataclass(frozen=True)
class Checkpoint:
    """A model of the pool, as `from_pretrained` is asked for it."""

    path: str
    dtype: str  # such as "bfloat16"
    device: str
    trust_remote_code: bool = False


@dataclass(frozen=True)
class _Answer:
    token_ids: list[list[int]]
    seconds: float
    target_passes: int


def reference_process(threads: int) -> ProcessPoolExecutor:
    """One process with so many threads."""
    spawn = multiprocessing.get_context("spawn")
    return ProcessPoolExecutor(1, spawn, initializer=_prepare, initargs=(threads,))


class ReferenceContender:
    """`generate`; with an assistant it serves one request at a time, as `transformers` does."""

    def __init__(
        self,
        name: str,
        process: Executor,
        target: Checkpoint,
        assistant: Checkpoint | None = None,
    ) -> None:
        self.name = name
        self._process, self._target, self._assistant = process, target, assistant

    def supports(self, batch: int) -> bool:
        return batch == 1 or self._assistant is None

    def run(self, work: Work) -> Sample:
        try:
            asked = (self._target, self._assistant, work)
            answer = self._process.submit(_generate, *asked).result()
        except BrokenProcessPool as error:
            raise MeasurementError(f"{self.name}: its process has ended") from error
        except Exception as error:  # whatever a model's code raises
            raise MeasurementError(f"{self.name}: {type(error).__name__}: {error}") from error
        return Sample(
            tokens=sum(map(len, answer.token_ids)),
            seconds=answer.seconds,
            distinct=tuple(map(distinct_share, answer.token_ids)),
            acceptance_length=len(answer.token_ids[0]) / answer.target_passes,
            requests=len(answer.token_ids),
        )


def _prepare(threads: int) -> None:
    torch.set_num_threads(threads)
    transformers.logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    transformers.logging.disable_progress_bar()  # type: ignore[no-untyped-call]


@functools.cache
def _loaded(checkpoint: Checkpoint) -> Any:
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(
        checkpoint.path,
        dtype=getattr(torch, checkpoint.dtype),
        trust_remote_code=checkpoint.trust_remote_code,
    )
    # Not the checkpoint's own defaults, such as a repetition penalty, which a chain ignores.
    own = model.generation_config
    settings: Any = transformers.GenerationConfig
    model.generation_config = settings(bos_token_id=own.bos_token_id, eos_token_id=own.eos_token_id)
    return model.to(checkpoint.device)


def _generate(target: Checkpoint, assistant: Checkpoint | None, work: Work) -> _Answer:
    model = _loaded(target)
    input_ids, mask = _padded([prompt.token_ids for prompt in work.prompts])
    # Never an end-of-text id before the full length, so that all do the same work.
    options: dict[str, Any] = {
        "max_new_tokens": work.new_tokens,
        "min_new_tokens": work.new_tokens,
        "pad_token_id": 0,
        "do_sample": work.temperature > 0,
    }
    if work.temperature > 0:
        options |= {"temperature": work.temperature, "top_k": 0, "top_p": 1.0}
    if assistant is not None:
        options["assistant_model"] = _loaded(assistant)
    passes: list[None] = []
    hook = model.register_forward_hook(lambda *_: passes.append(None))
    torch.manual_seed(work.seeds[0])
    try:
        started = time.perf_counter()
        output = model.generate(
            input_ids=input_ids.to(model.device), attention_mask=mask.to(model.device), **options
        )
        token_ids = output[:, input_ids.shape[1] :].tolist()
        seconds = time.perf_counter() - started
    finally:
        hook.remove()
    return _Answer(token_ids, seconds, len(passes))


def _padded(prompts: Sequence[Sequence[int]]) -> tuple[torch.Tensor, torch.Tensor]:
    """[B, L] ids and mask, padded on the left."""
    longest = max(map(len, prompts))
    pads = [longest - len(prompt) for prompt in prompts]
    ids = [[0] * pad + list(prompt) for pad, prompt in zip(pads, prompts, strict=True)]
    mask = [[0] * pad + [1] * (longest - pad) for pad in pads]
    return torch.tensor(ids), torch.tensor(mask)
