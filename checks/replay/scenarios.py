"""Real runs to record: as `bench chains`, `bench load` and `research.studies.routing` do.

Whatever takes turns with fixed chains is comparable: the trees of a fixed chain are those that
promised most for it when the adaptive policy last decided there.
"""

import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from checks.replay.recording import Phase, Round
from checks.replay.tape import Tape
from specrouter.bench.load_bench import LoadBench
from specrouter.bench.load_requests import load_labelled, read_arrivals, sweep
from specrouter.bench.load_services import OwnService
from specrouter.bench.options import LoadOptions
from specrouter.bench.progress import Progress
from specrouter.bench.prompts import load_prompts
from specrouter.request.params import SamplingParams, Speculation
from specrouter.router import ChainRouter
from specrouter.routing.scheduler import candidate_chains

_LONGEST_PROMPT = 96  # tokens
_REST_S = 0.01  # in which the engine ends the cycle that gave the last token
_LONGEST_CHAIN = 3
_REPEATS = 3  # adaptive runs for one of each fixed chain


@dataclass(frozen=True, kw_only=True)
class Stage:
    """A router whose engine is recorded, and texts by kind."""

    tape: Tape
    router: ChainRouter
    texts: Mapping[str, Sequence[str]]
    temperature: float
    seed: int = 0
    prompts: dict[str, list[list[int]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        tokenizer = self.router.pool.tokenizer
        for kind, found in self.texts.items():
            each = [list(tokenizer(text)["input_ids"])[-_LONGEST_PROMPT:] for text in found]
            self.prompts[kind] = each

    def take(self, kind: str, first: int, count: int) -> list[list[int]]:
        found = self.prompts[kind]
        return [found[(first + index) % len(found)] for index in range(count)]

    @property
    def chains(self) -> list[tuple[str, ...]]:
        pool = self.router.pool
        sizes = {name: pool.parameter_count(name) for name in pool.names}
        return list(candidate_chains(pool.names, sizes, pool.target, _LONGEST_CHAIN))

    def begin(self, phase: Phase) -> int:
        phases = self.tape.recording.phases
        phases.append(phase)
        return len(phases) - 1

    def run(
        self, phase: Phase, number: int, new_tokens: int, speculation: Any = None, **settings: Any
    ) -> None:
        """One batch under the phase's policy; what a fixed chain takes is noted.

        Without a fixed chain requests end one by one, so that decisions are made at many loads.
        """
        assert phase.batch is not None
        is_fixed = phase.chain is not None
        policy = phase.policy if phase.chain != (self.router.pool.target,) else "target-only"
        self.router.set_policy(policy, **settings)
        self.router.instruments.set_learning(not is_fixed)
        index = self.begin(phase)
        prompts = self.take(phase.kind, number * phase.batch, phase.batch)
        spread = np.linspace(0.25, 1.75, phase.batch) if phase.batch > 1 and not is_fixed else [1]
        lengths = np.resize(np.maximum(np.rint(np.multiply(spread, new_tokens)), 2), phase.batch)
        params = [
            SamplingParams(
                max_new_tokens=int(lengths[place]),
                temperature=self.temperature,
                seed=self.seed + 1000 * number + place,
                ignore_eos=True,
            )
            for place in range(phase.batch)
        ]
        started = time.perf_counter()
        outputs = self.router.generate(list(prompts), params, speculation)
        elapsed_ms = (time.perf_counter() - started) * 1000
        time.sleep(_REST_S)
        if is_fixed:
            tokens = sum(output.metrics.output_tokens for output in outputs)
            self.tape.recording.rounds.append(Round(index, tokens, elapsed_ms))

    def turn(self, kind: str, batch: int, number: int, new: int, fixed_new: int) -> None:
        """The adaptive policy on some prompts, then every chain on the first of them; whose turn is
        first changes."""
        for more in range(_REPEATS):
            self.run(Phase("adaptive", None, batch, kind), number + 10 * more, new)
        promised = dict(self.tape.promised)
        chains = self.chains
        start = number % len(chains)
        for chain in (*chains[start:], *chains[:start]):
            settings: dict[str, Any] = {}
            if len(chain) > 1:
                settings = {"chain": chain, **promised.get(chain, {"depth": 3, "width": 1})}
            self.run(Phase("static", chain, batch, kind), number, fixed_new, **settings)


def chains(
    stage: Stage, batches: Sequence[int], rounds: Sequence[int], new: int, fixed_new: int
) -> None:
    """Every chain in turn with the adaptive policy. `rounds` for each of `batches`."""
    for kind in stage.prompts:  # from a cold start, at some loads
        stage.run(Phase("adaptive", None, 1, kind), 90, new)
    for number in range(max(rounds)):
        for batch, most in zip(batches, rounds, strict=True):
            for kind in stage.prompts:
                if number < most:
                    stage.turn(kind, batch, number, new, fixed_new)


def paper(stage: Stage, batches: Sequence[int], new: int) -> None:
    """SpecRouter's formula."""
    for batch in batches:
        for kind in stage.prompts:
            stage.run(Phase("paper", None, batch, kind), 50, new)


def shift(stage: Stage, requests: int, new: int, fixed_new: int) -> None:
    """Text that changes kind, one request after the other; every chain on some of them."""
    for kind in stage.prompts:
        for number in range(requests):
            if number < 2:
                stage.turn(kind, 1, number, new, fixed_new)
            else:
                stage.run(Phase("adaptive", None, 1, kind), number, new)


def overrides(stage: Stage, rounds: int, new: int) -> None:
    """Requests that ask for a depth or width beside some that do not: several decisions a cycle."""
    asked = [None, Speculation(depth=2), Speculation(width=1), Speculation(depth=4, width=2), None]
    for number in range(rounds):
        for kind in stage.prompts:
            stage.run(Phase("adaptive", None, len(asked), kind), number, new, speculation=asked)


class _LabelledService(OwnService):
    """Every policy is a phase of its own."""

    def __init__(self, stage: Stage) -> None:
        super().__init__(stage.router)
        self._stage = stage

    def use(self, policy: str) -> None:
        time.sleep(_REST_S)
        super().use(policy)
        self._stage.begin(Phase(policy))


def load(
    stage: Stage,
    prompts: Sequence[Path],
    policies: Sequence[str],
    per_s: float,
    requests: int,
    output_tokens: int,
) -> float:
    """Poisson arrivals of requests with objectives. Gives the share of those attained."""
    options = LoadOptions(
        config=None,
        poisson=per_s,
        requests=requests,
        output_tokens=output_tokens,
        length_scale=0.1,
        policy=tuple(policies),
        prompts=tuple(prompts),
        temperature=stage.temperature,
    )
    tokenizer = stage.router.pool.tokenizer
    with Progress() as progress:
        bench = LoadBench(
            _LabelledService(stage),
            lambda text: tokenizer(text)["input_ids"],
            load_labelled(prompts),
            options,
            progress,
        )
        found = bench.run(sweep(read_arrivals(options), options, 512))
    rows = found["points"][0]["policies"].values()
    return statistics.fmean(row["attainment"] for row in rows)


def texts_of(files: Sequence[Path]) -> Mapping[str, Sequence[str]]:
    """By kind of text: code, mathematics, prose. The built-in prompts without files."""
    kinds = {"humaneval": "code", "gsm8k": "mathematics", "mt_bench": "prose"}
    return {kinds.get(name, name): found for name, found in load_prompts(list(files)).items()}
