"""The requests of a point of a sweep: prompts, seeds, and objectives as times what is taken alone.

Contract: pure. The same point, round and times alone give the same requests.
"""

from dataclasses import dataclass, replace

import numpy as np

from specrouter.bench.load_options import LoadOptions
from specrouter.bench.load_points import Point
from specrouter.bench.load_prompts import fill_prompts
from specrouter.bench.prompts import Texts, Tokenize
from specrouter.bench.replay import LoadRequest

_SEEDS_OF_A_ROUND = 100_000


@dataclass(frozen=True)
class Alone:
    """What a request takes on the target only while nothing else runs.

    `tpot_ms` of a token; `reading`: pairs of a prompt's tokens and its TTFT in ms, rising; none
    where no objective needs it.
    """

    tpot_ms: float
    reading: tuple[tuple[int, float], ...] = ()

    def ttft_ms(self, prompt_tokens: int) -> float | None:
        """On the line through `reading`; None without it."""
        if not self.reading:
            return None
        tokens, took_ms = np.array(self.reading).T
        return float(np.interp(prompt_tokens, tokens, took_ms))


@dataclass(frozen=True)
class RequestSource:
    """`tokenize` and `texts` make the prompts that `options` ask for."""

    tokenize: Tokenize
    texts: Texts
    options: LoadOptions

    def requests(self, point: Point, number: int, alone: Alone | None) -> list[LoadRequest]:
        """Of round `number`, from 0 on; without objectives where `alone` is not known yet."""
        options = self.options
        prompts = fill_prompts(point.arrivals, self.texts, self.tokenize, options.seed)
        first_seed = options.seed + number * _SEEDS_OF_A_ROUND
        return [
            self._with_objectives(
                LoadRequest(
                    arrival.at_s,
                    arrival.category,
                    prompt,
                    arrival.output_tokens,
                    options.temperature,
                    first_seed + index,
                ),
                arrival.slo_ratio,
                point.slo_scale,
                alone,
            )
            for index, (arrival, prompt) in enumerate(zip(point.arrivals, prompts, strict=True))
        ]

    def _with_objectives(
        self, request: LoadRequest, ratio: float | None, slo_scale: float, alone: Alone | None
    ) -> LoadRequest:
        """`ratio`: of the time of a token, in which `slo_scale` is already."""
        if alone is None:
            return request
        e2e_ms, slowdown = self.options.e2e_ms, self.options.ttft_slowdown
        ttft_ms = None if slowdown is None else alone.ttft_ms(len(request.token_ids))
        if slowdown is not None and ttft_ms is not None:
            ttft_ms *= slowdown * slo_scale
        return replace(
            request,
            objective_ms=None if ratio is None else ratio * alone.tpot_ms,
            e2e_ms=None if e2e_ms is None else e2e_ms * slo_scale,
            ttft_ms=ttft_ms,
        )
