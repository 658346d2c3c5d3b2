"""Where digests meet the project's simulated service, and the only file of theirs that does."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

from research.policies.adaserve import AdaServe, EqualGreedy
from research.replay.stretches import Arrival
from research.sim.machine import Machine
from research.sim.service import SimulatedService
from specrouter.bench.replay import LoadRequest, figures, replay
from specrouter.config import TreesConfig
from specrouter.profile.time_curve import TimeCurve

MACHINES_FILE = Path(__file__).parent / "machines.json"
POLICIES = ("target-only", "spec-4", "equal-greedy", "global-greedy", "slo", "adaserve", "goodput")
# Selections that a configuration may ask for, with the scheduler's own chains and budgets.
_CONFIGURED = {
    "equal-greedy": EqualGreedy(reshapes=False),
    "slo": AdaServe(reshapes=False),
    "adaserve": AdaServe(),
}

_SEEDS_OF_A_RUN = 100_000
_PUBLISHED_BASELINE_MS = 30.0  # on which objectives in milliseconds were stated


@dataclass(frozen=True)
class Result:
    requests: int
    violations: int
    goodput: float  # tokens per second of requests that attained their objective
    ttft_p99_ms: float

    def to_json(self) -> dict[str, Any]:
        return {name: round(value, 3) for name, value in asdict(self).items()}


@dataclass(frozen=True, kw_only=True)
class MachineFile:
    """A machine, and how traces are fitted to its speed.

    Attributes:
        drafter, target: points (tokens, ms) of a forward's time, and what attention adds.
        baseline_ms: of a token of a request alone.
        length_scale, gap_scale: factors on lengths and on the times between requests.
        is_published: objectives in milliseconds are meant as such.
    """

    name: str
    drafter: Mapping[str, Any]
    target: Mapping[str, Any]
    baseline_ms: float
    prefill_chunk: int
    max_requests: int
    length_scale: float = 1.0
    gap_scale: float = 1.0
    is_published: bool = True
    source: str = ""

    def machine(self) -> Machine:
        times = {"drafter": _curve(self.drafter), "target": _curve(self.target)}
        sizes = {"drafter": 1, "target": 70}
        return Machine(
            target="target",
            times=times,
            parameters=sizes,
            prefill_chunk=self.prefill_chunk,
            max_requests=self.max_requests,
        )

    def requests(self, stretch: Sequence[Arrival], seed: int) -> list[LoadRequest]:
        return [
            LoadRequest(
                at_s=one.at_s * self.gap_scale,
                category=one.category,
                token_ids=_prompt(max(1, round(one.input_tokens * self.length_scale))),
                new_tokens=max(2, round(one.output_tokens * self.length_scale)),
                temperature=1.0,
                seed=seed * _SEEDS_OF_A_RUN + index,
                objective_ms=self._objective_ms(one.slo),
            )
            for index, one in enumerate(stretch)
        ]

    def _objective_ms(self, slo: float) -> float:
        if slo < 0 and self.is_published:
            return -slo
        return self.baseline_ms * (slo if slo > 0 else -slo / _PUBLISHED_BASELINE_MS)


def load_machines(path: Path = MACHINES_FILE) -> dict[str, MachineFile]:
    found = json.loads(path.read_text(encoding="utf-8"))
    return {name: MachineFile(name=name, **fields) for name, fields in found.items()}


def simulate(
    machine: MachineFile, acceptance: float, stretch: Sequence[Arrival], policy: str, seed: int
) -> Result:
    """One stretch under one policy. The seed draws acceptances, and nothing else."""
    service = SimulatedService(
        machine=machine.machine(), acceptance=acceptance, trees=TreesConfig()
    )
    selection = _CONFIGURED.get(policy)
    service.use("goodput" if selection else policy, selection)
    found = figures(replay(machine.requests(stretch, seed), service, service))
    return Result(
        found["requests"],
        found["violations"],
        found["goodput_tokens_per_s"],
        found["ttft_ms"]["p99"],
    )


def _curve(stored: Mapping[str, Any]) -> TimeCurve:
    points = tuple((float(tokens), float(ms)) for tokens, ms in stored["points"])
    return TimeCurve(points, stored.get("slope_ms_per_million", 0.0))


@cache
def _prompt(tokens: int) -> tuple[int, ...]:
    return tuple(range(tokens))
