"""`specrouter bench load --simulate`: the policies in simulated time, where nothing else runs.

Nothing decodes. A cycle takes what the models' measured curves say, drafts are drawn at random
(`specrouter.sim.text`), and who takes part, which trees are drafted and what the target
verifies is decided by what decides it in the engine: `ModelChainScheduler` and `TreePlanner`. What
the engine has around these is left out: texts that drafters read, loading, exploration,
outcomes that differ from predictions, its own time, and that of sampling.

So it tells policies apart that a busy machine does not, within seconds, and says nothing of how
true predictions are. The same seeds give the same figures.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache

import numpy as np
from numpy.typing import NDArray

from processors import share_chunk
from specrouter.config import SchedulerConfig, TreesConfig
from specrouter.cycle import Option
from specrouter.profile.acceptance import SHAPE_DEPTHS, SHAPE_NODES, SHAPE_WIDTHS, TreeAcceptance
from specrouter.profile.prediction import Limits, OptionGrid, Workload, verification_ms
from specrouter.profile.snapshot import Outcome, PerformanceSnapshot, TreeKey, load_of
from specrouter.request.params import MAX_TREE_TOKENS
from specrouter.routing.scheduler import ModelChainScheduler, Models
from specrouter.sim.machine import Machine
from specrouter.sim.replay import Answer, LoadRequest
from specrouter.sim.text import SimulatedText, gain_over_law, learned
from specrouter.slo.cycle_shape import Beside
from specrouter.slo.policies import POLICIES
from specrouter.slo.tree_planner import Progress, TreePlanner, cycle_cost
from specrouter.slo.tree_selection import whole
from specrouter.view import ChainDecision

Ints = NDArray[np.int64]

_MODES = (False, True)  # of sampling
NOT_SIMULATED: Mapping[str, str] = {"static-tree": "its tree has a form of its own"}


@dataclass(eq=False)
class _Run:
    """A request, in seconds of the simulation; a `Pending`."""

    request: LoadRequest
    sent_s: float
    read: int = 0  # tokens of its prompt
    tokens: int = 0
    passes: int = 0
    waited: int = 0  # cycles in a row that it has sat out
    first_s: float = math.nan
    last_s: float = math.nan
    is_cancelled: bool = False

    @property
    def unread(self) -> int:
        return len(self.request.token_ids) - self.read

    @property
    def is_done(self) -> bool:
        return self.is_cancelled or self.tokens >= self.request.new_tokens

    def cancel(self) -> None:
        self.is_cancelled = True

    def take(self, tokens: int, now_s: float) -> None:
        if not self.tokens:
            self.first_s = now_s
        self.tokens = min(self.tokens + tokens, self.request.new_tokens)
        self.last_s = now_s

    def answer(self) -> Answer:
        error = "cancelled" if self.is_cancelled else None
        if not self.tokens:
            return Answer(None, None, 0, error=error)
        tpot_ms = None
        if self.tokens > 1:
            tpot_ms = (self.last_s - self.first_s) * 1000 / (self.tokens - 1)
        accepted = (self.tokens - 1) / self.passes if self.passes else None
        ttft_ms = (self.first_s - self.sent_s) * 1000
        return Answer(ttft_ms, tpot_ms, self.tokens, accepted, error)


@dataclass
class SimulatedService:
    """A service and its clock: time passes while the client sleeps.

    A cycle that has begun goes on beyond the client's time; what is sent meanwhile is met by the
    next one, as in the engine.
    """

    machine: Machine
    text: SimulatedText
    trees: TreesConfig
    _scheduler: ModelChainScheduler = field(init=False, repr=False)
    _planner: TreePlanner = field(init=False, repr=False)
    _snapshot: PerformanceSnapshot = field(init=False, repr=False)
    _draws: np.random.Generator = field(init=False, repr=False)
    _runs: list[_Run] = field(default_factory=list)  # in the order of admission
    _waiting: list[_Run] = field(default_factory=list)
    _now_s: float = 0.0  # of the client
    _free_s: float = 0.0  # when the engine's cycle ends

    def __post_init__(self) -> None:
        machine = self.machine
        known: dict[TreeKey, TreeAcceptance] = {
            ((machine.drafter,), machine.target, mode): learned(self.text) for mode in _MODES
        }
        usual = Outcome(tokens=gain_over_law(self.text))
        loads = {load_of(count) for count in range(1, machine.max_requests + 1)}
        self._snapshot = PerformanceSnapshot(
            machine.times,
            machine.parameters,
            trees=known,
            usual_outcomes={(load, mode): usual for load in loads for mode in _MODES},
        )
        self._draws = np.random.default_rng(0)
        self._decision = cache(self._decide)
        self._levels_ms = cache(self._find_levels_ms)
        self.use("target-only")

    # The service

    def use(self, policy: str) -> None:
        """One of `POLICIES` that is not among `NOT_SIMULATED`, from now on."""
        chosen = POLICIES[policy]
        config = SchedulerConfig.model_validate({"policy": chosen.policy, **chosen.settings})
        changed = {"selection": chosen.selection, "shape": chosen.shape}
        self._planner = TreePlanner(self.trees.model_copy(update=changed), chosen.selection)
        self._scheduler = ModelChainScheduler(
            config,
            self.machine.chain,
            self.machine.parameters,
            self.machine.target,
            whole_trees=chosen.selection == "whole",
        )
        self._decision.cache_clear()

    def send(self, request: LoadRequest) -> _Run:
        if not (self._runs or self._waiting):
            self._draws = np.random.default_rng(request.seed)
        run = _Run(request, self._now_s)
        self._waiting.append(run)
        return run

    # The clock

    def now_s(self) -> float:
        return self._now_s

    def sleep_s(self, duration_s: float) -> None:
        self._now_s += duration_s
        while self._free_s < self._now_s:
            self._admit()
            if not self._runs:
                self._free_s = self._now_s
            else:
                self._free_s += self._cycle() / 1000

    # A cycle

    def _admit(self) -> None:
        self._runs = [run for run in self._runs if not run.is_done]
        self._waiting = [run for run in self._waiting if not run.is_done]
        free = self.machine.max_requests - len(self._runs)
        came = [run for run in self._waiting if run.sent_s <= self._free_s]
        self._runs += came[:free]
        self._waiting = [run for run in self._waiting if run not in self._runs]

    def _cycle(self) -> float:
        """Its milliseconds; tokens come at its end."""
        wanted = np.array([run.unread for run in self._runs])
        chunks = share_chunk(wanted, self.machine.prefill_chunk)
        prompt_tokens = int(chunks.sum())
        decoding = [run for run in self._runs if not run.unread]
        gained, cycle_ms = self._decode(decoding, prompt_tokens)
        end_s = self._free_s + cycle_ms / 1000
        for run, chunk in zip(self._runs, chunks.tolist(), strict=True):
            if chunk:
                run.read += chunk
                if not run.unread:
                    run.take(1, end_s)
        for run, tokens in gained:
            run.take(tokens, end_s)
            run.passes += 1
        return cycle_ms

    def _decode(
        self, decoding: list[_Run], prompt_tokens: int
    ) -> tuple[list[tuple[_Run, int]], float]:
        """Those that gain tokens, and how many, and the time of the cycle."""
        if not decoding:
            return [], self._target_ms(0, 0, prompt_tokens)
        progress = self._progress(decoding)
        decision = self._decision(len(self._runs))
        main = decision.predicted or Option(decision.chain, decision.shape)
        grid = decision.grids.get(self.machine.chain)
        choice = self._planner.choose(self._snapshot, main, grid, progress, Beside(prompt_tokens))
        active = [decoding[at] for at in np.flatnonzero(choice.active)]
        for run in decoding:
            run.waited = 0 if run in active else run.waited + 1
        if choice.option is None:
            gained = np.ones(len(active), dtype=np.int64)
            cycle_ms = self._target_ms(len(active), len(active), prompt_tokens)
        else:
            part = progress.of(np.flatnonzero(choice.active))
            gained, cycle_ms = self._speculate(choice.option, part, prompt_tokens)
        return list(zip(active, gained.tolist(), strict=True)), cycle_ms

    def _speculate(
        self, option: Option, progress: Progress, prompt_tokens: int
    ) -> tuple[Ints, float]:
        """[A] tokens, and milliseconds."""
        active = len(progress.rows)
        drawn = self.text.draw(active, option.shape.depth, option.shape.width, self._draws)
        levels_ms = self._levels_ms(active)[_shape_for(option)]
        if self._planner.selection == "whole":
            chosen = whole(drawn.candidates)
        else:
            budget = self.trees.budget_tokens
            nodes = (
                option.shape.nodes * active if budget is None else budget - active - prompt_tokens
            )
            nodes = max(0, nodes)
            cost = cycle_cost(
                self._snapshot,
                Workload(active, self.machine.slots),
                self.machine.target,
                levels_ms,
                prompt_tokens,
                1.0,
            )
            select = self._planner.selector(progress, cost, nodes)
            chosen = select(progress.rows, drawn.candidates, 0)
        gained: Ints = 1 + drawn.walk(chosen, self._draws)
        places = active + int(chosen.sum())
        return gained, levels_ms + self._target_ms(places, active, prompt_tokens)

    def _progress(self, decoding: list[_Run]) -> Progress:
        objectives = [run.request.objective_ms for run in decoding]
        return Progress.made(
            np.arange(len(decoding)),
            np.array([(self._free_s - run.first_s) * 1000 for run in decoding]),
            np.array([run.tokens - 1 for run in decoding]),
            np.array([run.request.new_tokens - run.tokens for run in decoding]),
            np.array([run.waited for run in decoding]),
            np.array([math.nan if each is None else each for each in objectives]),
        )

    def _decide(self, requests: int) -> ChainDecision:
        workload = Workload(requests, self.machine.slots)
        return self._scheduler.choose(self._snapshot, workload, Models(self.machine.chain))

    def _find_levels_ms(self, requests: int) -> list[float]:
        """Of drafting trees of each shape."""
        workload = Workload(requests, self.machine.slots)
        grid = OptionGrid(self.machine.chain, self._snapshot, workload, Limits())
        return [float(each) for each in grid.levels_ms[:, 0]]

    def _target_ms(self, places: int, requests: int, prompt_tokens: int) -> float:
        workload = Workload(max(1, requests), self.machine.slots)
        found = verification_ms(
            self._snapshot, workload, self.machine.target, np.array([places]), prompt_tokens
        )
        return float(found[0])


def _shape_for(option: Option) -> int:
    """The smallest known one that holds an option's drafts."""
    shape = option.shape
    holds = (shape.depth <= SHAPE_DEPTHS) & (shape.width <= SHAPE_WIDTHS)
    return int(np.argmin(np.where(holds, SHAPE_NODES, MAX_TREE_TOKENS + 1)))
