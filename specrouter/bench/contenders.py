"""Contenders that are this service itself: one router, asked to decode in different ways.

One router for all of them, since every router loads the target and has an engine thread with
OpenMP workers of its own. So the policies know what the other contenders' runs taught the profiler,
as those of a service that has been up for a while do.
"""

import secrets
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Literal, Protocol

from specrouter.bench.prompts import BenchPrompt, Work
from specrouter.bench.sample import MeasurementError, Sample, distinct_share, mean_of_known, spent
from specrouter.config.policies import CHAIN_POLICIES
from specrouter.profile.profiler import EngineStatistics
from specrouter.request.output import RequestOutput
from specrouter.request.params import SamplingParams
from specrouter.router import ChainRouter


class Contender(Protocol):
    name: str

    def run(self, work: Work) -> Sample:
        """Raises `MeasurementError`."""


class OwnContender:
    """The router under a policy with its settings; `speculation` overrides it in every request."""

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
        asked = zip(work.prompts, work.seeds, strict=True)
        tenant = secrets.token_hex(8)
        params = [self.params(work, prompt, seed, tenant) for prompt, seed in asked]
        prompts = [prompt.token_ids for prompt in work.prompts]
        self.router.set_policy(self._policy, **self._settings)
        # What other contenders do would teach the adaptive one for nothing.
        learns = self._speculation is None and CHAIN_POLICIES.find(self._policy).learns
        self.router.instruments.set_learning(learns)
        before = self.router.instruments.statistics()
        started = time.perf_counter()
        outputs = self.router.generate(prompts, params, self._speculation)
        seconds = time.perf_counter() - started
        return self._sample(outputs, seconds, spent(before, self.router.instruments.statistics()))

    def params(self, work: Work, prompt: BenchPrompt, seed: int, tenant: str) -> SamplingParams:
        """What a prompt is asked with.

        Contenders are given the same prompts and seeds, and say the same: what one of them has
        read or said must not help the next, so nothing is kept of prompts, and every run is a
        tenant's own.
        """
        return SamplingParams(
            max_new_tokens=work.new_tokens,
            temperature=work.temperature,
            seed=seed,
            ignore_eos=True,
            prefix_cache=False,
            cache_salt=tenant,
        )

    def _sample(
        self, outputs: Sequence[RequestOutput], seconds: float, engine: EngineStatistics
    ) -> Sample:
        failed = next((o for o in outputs if o.error is not None), None)
        if failed is not None:
            raise MeasurementError(f"{self.name}: {failed.error}")
        chains: Counter[str] = Counter()
        for output in outputs:
            chains.update({">".join(c): count for c, count in output.metrics.chains.items()})
        return Sample(
            tokens=sum(len(output.token_ids) for output in outputs),
            seconds=seconds,
            distinct=tuple(distinct_share(output.token_ids) for output in outputs),
            acceptance_length=sum(output.metrics.acceptance_length for output in outputs)
            / len(outputs),
            engine=engine,
            chains=dict(chains),
            requests=len(outputs),
            tpot_ms=mean_of_known(output.metrics.tpot_ms for output in outputs),
        )
