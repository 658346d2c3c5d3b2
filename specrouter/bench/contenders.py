"""Contenders that take turns on the same work, and those that are this service itself.

The latter share one router, which decodes in different ways: every router loads the target, and has
an engine thread with OpenMP workers of its own. So the profiler has learned from the other
contenders' runs, as in a service that has run for a while.
"""

import secrets
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import product
from statistics import fmean
from typing import Any, Literal, Protocol

from specrouter.bench.figures import Sample, distinct_share, mean_of_known, speeds
from specrouter.bench.prompts import BenchPrompt, Work
from specrouter.config.policies import CHAIN_POLICIES
from specrouter.progress import Progress
from specrouter.request.params import SamplingParams
from specrouter.router import ChainRouter


class MeasurementError(RuntimeError):
    """Raised when a contender fails."""


class Contender(Protocol):
    name: str

    def run(self, work: Work) -> Sample:
        """Serve the work and return its sample. Raises `MeasurementError`."""


class OwnContender:
    """The router under a policy and its settings; `speculation` overrides it in every request."""

    def __init__(
        self,
        name: str,
        router: ChainRouter,
        policy: str = "adaptive",
        settings: Mapping[str, Any] | None = None,
        speculation: Literal["off"] | None = None,
    ) -> None:
        self.name = name
        self.router, self._policy, self._settings = router, policy, settings or {}
        self._speculation = speculation

    def run(self, work: Work) -> Sample:
        tenant, engine = secrets.token_hex(8), self.router.instruments
        params = [
            self.params(work, prompt, seed, tenant)
            for prompt, seed in zip(work.prompts, work.seeds, strict=True)
        ]
        prompts = [prompt.token_ids for prompt in work.prompts]
        self.router.set_policy(self._policy, **self._settings)
        # Only runs of policies that learn may change what the engine has learned.
        learns = self._speculation is None and CHAIN_POLICIES.find(self._policy).learns
        engine.set_learning(learns)
        before, started = engine.statistics(), time.perf_counter()
        outputs = self.router.generate(prompts, params, self._speculation)
        seconds, after = time.perf_counter() - started, engine.statistics()
        failed = next((output.error for output in outputs if output.error is not None), None)
        if failed is not None:
            raise MeasurementError(f"{self.name}: {failed}")
        chains: Counter[str] = Counter()
        for output in outputs:
            chains.update({">".join(c): count for c, count in output.metrics.chains.items()})
        return Sample(
            tokens=sum(len(output.token_ids) for output in outputs),
            seconds=seconds,
            distinct=tuple(distinct_share(output.token_ids) for output in outputs),
            acceptance_length=fmean(output.metrics.acceptance_length for output in outputs),
            cycle_ms=after.cycle_ms - before.cycle_ms,
            control_ms=after.control_ms - before.control_ms,
            chains=chains,
            requests=len(outputs),
            tpot_ms=mean_of_known(output.metrics.tpot_ms for output in outputs),
        )

    def params(self, work: Work, prompt: BenchPrompt, seed: int, tenant: str) -> SamplingParams:
        """Return the sampling parameters of a prompt.

        All contenders get the same prompts and seeds, and give the same texts. One's prompts and
        outputs must not help the next, so prompts are not cached, and every run has a tenant of its
        own.
        """
        return SamplingParams(
            max_new_tokens=work.new_tokens,
            temperature=work.temperature,
            seed=seed,
            ignore_eos=True,
            prefix_cache=False,
            cache_salt=tenant,
        )


def measure(
    contenders: Sequence[Contender],
    deal: Callable[[int], Sequence[Work]],
    rounds: int,
    label: str,
    progress: Progress,
) -> dict[str, list[list[Sample]]]:
    """Measure all contenders, and return samples by contender, as [round][batch of the round].

    A round before the first one warms up.

    Args:
        contenders: take turns on each batch.
        deal: returns the work of a round, by its number.
        rounds: number of rounds.
        label: names the measurement in the progress.
        progress: shows it.

    Raises:
        MeasurementError: a contender failed.
    """
    samples: dict[str, list[list[Sample]]] = {one.name: [] for one in contenders}
    dealt = [deal(number % rounds) for number in range(-1, rounds)]
    progress.expect(sum(map(len, dealt)) * len(contenders))
    for number, works in enumerate(dealt, -1):
        where = f"{label}, round {number + 1}/{rounds}" if number >= 0 else f"{label}, warm-up"
        of_round: dict[str, list[Sample]] = {name: [] for name in samples}
        for work, contender in product(works, contenders):
            progress.show(f"{where}: {contender.name}")
            of_round[contender.name].append(contender.run(work))
            progress.step()
        if number >= 0:
            for name, found in of_round.items():
                samples[name].append(found)
        figures = (f"{name} {speeds([found])[0]:.1f}" for name, found in of_round.items())
        progress.note(f"{where}: {', '.join(figures)} tokens/s")
    return samples
