"""What is possible at least, on AdaServe's machines, for who knows all arrivals and drafts.

    python -m research.studies.clairvoyant adaserve-llama70b 4.4 0.3 --traces FOLDER

Hill climbing over plans: who sits out, whose prompt waits for how long, how many run at once, how
much is read of prompts in a cycle, and what tokens are worth beyond those that are needed. A plan
is run on the machine's times, cycle by cycle. Whoever sits out is served when all others have
ended, and counts as missed; so does whoever has no first token `--first-token-s` after its arrival.
What is found is possible; it is no proof that more is not.
"""

import argparse
import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from research.figures.cell import machine_of
from research.sim.adaserve_load import AdaserveLoad
from research.sim.machine import Machine
from research.studies.frozen_drafts import WIDTH, FrozenDrafts, freeze
from specrouter.bench.replay import LoadRequest

Floats = NDArray[np.float64]

_WAITS_S = (0.0, 0.5, 1.0, 2.0, 4.0, 8.0)
_RUNNING = (8, 12, 16, 20, 24, 28, 32, 40, 48, 64)
_CHUNKS = (128, 256, 512)
_SPARE = (0.0, 0.03, 0.1, 0.3, 1.0)  # of a token beyond those that are needed
_MOST_CHANGES = 4  # of requests, in one step of the search


@dataclass(frozen=True)
class Plan:
    """Attributes:
    out: [N] who sits out; `waits_s`: [N] from the arrival until the prompt may be read.
    running: at once; `chunk`: prompt tokens of a cycle.
    spare: worth of a token beyond those that a request needs to be in time.
    """

    out: tuple[bool, ...]
    waits_s: tuple[float, ...]
    running: int = 64
    chunk: int = 512
    spare: float = 0.1


@dataclass(frozen=True, eq=False)
class Ran:
    """Attributes:
    attained: [N] who was in time.
    first_s: [N] from arrival to the first token; infinite for those that sat out.
    end_s: when the last one ended.
    """

    attained: NDArray[np.bool_]
    first_s: Floats
    end_s: float


@dataclass(frozen=True, eq=False)
class Problem:
    machine: Machine
    requests: Sequence[LoadRequest]
    drafts: FrozenDrafts
    first_token_s: float
    arrived_s: Floats = field(init=False)
    objective_ms: Floats = field(init=False)

    def __post_init__(self) -> None:
        made = {one.new_tokens for one in self.requests}
        assert len(made) == 1, "outputs of one length"
        longest = sorted(len(one.token_ids) + one.new_tokens for one in self.requests)
        budget = self.machine.kv_tokens
        assert budget is None or sum(longest[-self.machine.max_requests :]) <= budget, "memory"
        object.__setattr__(self, "arrived_s", np.array([one.at_s for one in self.requests]))
        objectives = [one.objective_ms or np.inf for one in self.requests]
        object.__setattr__(self, "objective_ms", np.array(objectives))

    def run(self, plan: Plan) -> Ran:
        return _Run(self, plan).ran()


class _Run:
    """A plan in simulated time."""

    def __init__(self, problem: Problem, plan: Plan) -> None:
        count = len(problem.requests)
        self.problem, self.plan = problem, plan
        self.new_tokens = problem.requests[0].new_tokens
        self.unread = np.array([len(one.token_ids) for one in problem.requests])
        self.tokens = np.zeros(count, dtype=np.int64)
        self.first_s, self.last_s = np.full(count, np.inf), np.full(count, np.inf)
        self.ready_s = problem.arrived_s + np.array(plan.waits_s)
        self.now_s, self.cycle_ms = 0.0, 50.0
        machine = problem.machine
        steps = np.arange(1, 4097)
        self.target_ms = np.array([machine.times[machine.target].at(int(n)) for n in steps])
        self.drafter_ms = np.array([machine.times[machine.drafters[0]].at(int(n)) for n in steps])

    def ran(self) -> Ran:
        out = np.array(self.plan.out)
        served = np.flatnonzero(~out)
        self._serve(served[np.argsort(self.ready_s[served], kind="stable")], self.plan.running)
        first_s = np.where(out, np.inf, self.first_s - self.problem.arrived_s)
        took_ms = 1000.0 * (self.last_s[served] - self.first_s[served])
        tpot_ms = took_ms / (self.new_tokens - 1)
        in_time = np.zeros(len(out), dtype=np.bool_)
        in_time[served] = tpot_ms <= self.problem.objective_ms[served] * (1.0 + 1e-9)
        in_time &= first_s <= self.problem.first_token_s
        self._serve(np.flatnonzero(out), self.problem.machine.max_requests)
        return Ran(in_time, first_s, self.now_s)

    def _serve(self, order: NDArray[Any], most: int) -> None:
        waiting, reading, decoding = order.tolist(), list[int](), list[int]()
        while waiting or reading or decoding:
            while waiting and len(reading) + len(decoding) < most:
                if self.ready_s[waiting[0]] > self.now_s:
                    break
                reading.append(waiting.pop(0))
            if not reading and not decoding:
                self.now_s = float(self.ready_s[waiting[0]])
                continue
            chunks, left = dict[int, int](), self.plan.chunk
            for each in reading:
                chunks[each] = min(left, int(self.unread[each]))
                left -= chunks[each]
            self._cycle(np.array(decoding, dtype=np.int64), sum(chunks.values()))
            for each, chunk in chunks.items():
                self.unread[each] -= chunk
                if chunk and not self.unread[each]:
                    self.tokens[each], self.first_s[each] = 1, self.now_s
                    decoding.append(each)
            reading = [each for each in reading if self.unread[each]]
            ended = [each for each in decoding if self.tokens[each] >= self.new_tokens]
            self.last_s[ended] = self.now_s
            decoding = [each for each in decoding if self.tokens[each] < self.new_tokens]

    def _cycle(self, rows: NDArray[Any], prompt: int) -> None:
        """The way to draft that brings most tokens that are needed, and others for what they are
        worth, a millisecond; in it who needs no more than a token a cycle drafts too, or not."""
        drafts, batch = self.problem.drafts, len(rows)
        prompt_ms = self.drafter_ms[prompt - 1] if prompt else 0.0  # the drafter reads it too
        if not batch:
            self._pass(prompt_ms + self.target_ms[prompt - 1])
            return
        left = self.new_tokens - self.tokens[rows]
        spent_ms = 1000.0 * (self.now_s - self.first_s[rows])
        total_ms = self.problem.objective_ms[rows] * (self.new_tokens - 1)
        pace_ms = np.maximum((total_ms - spent_ms) / left, 1e-3)
        at = rows, self.tokens[rows]
        drafting = (pace_ms < self.cycle_ms)[:, None] | np.array([False, True])[:, None, None]
        nodes = (drafting * drafts.nodes[at]).astype(np.float64)  # [2, B, K]
        gain = np.minimum(1.0 + drafting * drafts.promised[at], left[:, None])
        step_ms = self.drafter_ms[batch * WIDTH - 1]
        verified = np.rint(nodes.sum(axis=1)).astype(np.int64) + batch + prompt
        ms = prompt_ms + drafts.depths * step_ms + self.target_ms[verified - 1]  # [2, K]
        needed = np.minimum(gain, ms[:, None, :] / pace_ms[:, None])
        spare = self.plan.spare
        value = ((1.0 - spare) * needed + spare * gain).sum(axis=1) / ms
        who, way = np.unravel_index(int(value.argmax()), value.shape)
        accepted = drafting[who][:, 0] * drafts.accepted[at][:, way]
        self.tokens[rows] += np.minimum(1 + accepted.astype(np.int64), left)
        self._pass(float(ms[who, way]))

    def _pass(self, ms: float) -> None:
        self.cycle_ms = ms
        self.now_s += ms / 1000.0


def climb(problem: Problem, evaluations: int, seed: int) -> tuple[Plan, Ran]:
    """The best plan found; the same for a seed and a number of evaluations. What holds for all
    requests is tried first, then it climbs from the best of that."""
    draw, count = random.Random(f"climb {seed}"), len(problem.requests)
    best = Plan((False,) * count, (0.0,) * count)
    ran = problem.run(best)
    first = [replace(best, running=most, spare=spare) for most, spare in product(_RUNNING, _SPARE)]
    for number in range(evaluations):
        plan = first[number] if number < len(first) else _changed(best, ran, draw)
        found = problem.run(plan)
        if found.attained.sum() >= ran.attained.sum():
            best, ran = plan, found
    return best, ran


def _changed(plan: Plan, ran: Ran, draw: random.Random) -> Plan:
    kind = draw.random()
    if kind < 0.12:
        changed: dict[str, Any] = draw.choice(
            [
                {"running": draw.choice(_RUNNING)},
                {"chunk": draw.choice(_CHUNKS)},
                {"spare": draw.choice(_SPARE)},
            ]
        )
        return replace(plan, **changed)
    missed = [at for at, done in enumerate(ran.attained) if not done and not plan.out[at]]
    if kind < 0.2 and missed:  # they miss anyway
        chosen = draw.sample(missed, max(1, len(missed) // 2))
        return replace(plan, out=_flipped(plan.out, chosen))
    many = draw.randint(1, _MOST_CHANGES)
    if kind < 0.6:
        aside = [at for at, sits_out in enumerate(plan.out) if sits_out]
        among = aside if draw.random() < 0.5 and aside else missed or range(len(plan.out))
        return replace(plan, out=_flipped(plan.out, draw.sample(among, min(many, len(among)))))
    waits_s, near = list(plan.waits_s), draw.randrange(len(plan.out))
    for at in range(near, min(near + many, len(waits_s))):
        waits_s[at] = draw.choice(_WAITS_S)
    return replace(plan, waits_s=tuple(waits_s))


def _flipped(out: tuple[bool, ...], chosen: Sequence[int]) -> tuple[bool, ...]:
    return tuple(sits_out != (at in chosen) for at, sits_out in enumerate(out))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("machine")
    parser.add_argument("rate", type=float)
    parser.add_argument("urgent_share", type=float)
    parser.add_argument("--acceptance", type=float, default=0.65)
    parser.add_argument("--traces", type=Path, help="folder; left out, arrivals are drawn")
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--evaluations", type=int, default=300)
    parser.add_argument("--first-token-s", type=float, default=10.0)
    asked = parser.parse_args()
    machine = machine_of(asked.machine)
    load = AdaserveLoad(
        asked.rate, asked.requests, asked.seed, asked.urgent_share, traces=asked.traces
    )
    requests = load.requests_for(machine.times[machine.target].at(1))
    for known in (False, True):
        tokens = requests[0].new_tokens
        drafts = freeze(len(requests), tokens, asked.acceptance, asked.seed, known)
        problem = Problem(machine, requests, drafts, asked.first_token_s)
        print(f"drafts {'known' if known else 'unknown'}:")
        for name, evaluations in (("no plan", 0), ("search", asked.evaluations)):
            plan, ran = climb(problem, evaluations, asked.seed)
            goodput = tokens * ran.attained.sum() / ran.end_s
            served = ran.first_s[np.isfinite(ran.first_s)]
            first_s = np.quantile(served, 0.99)
            print(
                f"  {name}: {ran.attained.mean():.1%} in time, {goodput:.0f} tokens/s of goodput, "
                f"{sum(plan.out)} sit out, p99 of TTFT of the others {first_s:.1f} s; "
                f"{plan.running} at once, chunks of {plan.chunk}, spare {plan.spare}",
                flush=True,
            )


if __name__ == "__main__":
    main()
