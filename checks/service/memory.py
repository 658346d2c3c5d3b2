"""Is memory flat while requests come and go? Short requests on the bundled pool, in this process.

Prompts share beginnings and differ in length, so rows come and go, prefixes are kept, found and
dropped, and every drafter is used. Resident memory is looked at each 500 requests; the first 2,000
are warm-up, in which the cache fills and torch takes its workspaces.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Iterator
from typing import Any

import numpy as np

from checks.exact.report import conditions, prepare
from checks.service.service import rss_mb
from specrouter import ChainRouter, SamplingParams, Speculation
from specrouter.cli.arguments import default_config
from specrouter.config.yaml_file import read_mapping
from specrouter.request.spec import SpeculationOverride

_WARM_UP, _EVERY = 2_000, 500  # requests
_ALLOWED_DRIFT = 0.05
_TOGETHER = 50  # requests in flight, more than rows
_SPECULATION: tuple[SpeculationOverride, ...] = (
    None, None, "off",
    Speculation(("tiny-1m", "tiny-8m"), 4, 2), Speculation(("tiny-3m", "tiny-8m"), 3),
    Speculation(("tiny-1m", "tiny-3m", "tiny-8m"), 3),
)  # fmt: skip


def settings() -> dict[str, Any]:
    config = read_mapping(default_config())
    engine = {"max_requests": 16, "max_model_len": 256, "kv_memory": "48MiB"}
    return {**config, "engine": {**config["engine"], **engine}}


def serve(router: ChainRouter, requests: int) -> Iterator[tuple[int, float]]:
    """Requests so far, and MiB of resident memory, each `_EVERY` requests."""
    draws, done = np.random.default_rng(0), 0
    common = draws.integers(0, 4000, 60).tolist()
    while done < requests:
        pending = []
        for _ in range(_TOGETHER):
            begun = common[: int(draws.integers(0, 60))]
            own = draws.integers(0, 4000, int(draws.integers(1, 60))).tolist()
            params = SamplingParams(
                max_new_tokens=int(draws.integers(1, 4)),
                temperature=float(draws.integers(0, 2)),
                seed=done,
            )
            speculation = _SPECULATION[int(draws.integers(0, len(_SPECULATION)))]
            pending.append(router.submit([*begun, *own], params, speculation))
        for handle in pending:
            error = handle.result(600).error
            assert error is None, error
        done += len(pending)
        if done % _EVERY == 0:
            yield done, rss_mb("self")


def drift(seen: dict[int, float]) -> float:
    """The largest share by which memory after the warm-up is off its median."""
    settled = [mib for done, mib in seen.items() if done >= _WARM_UP]
    middle = statistics.median(settled)
    return max(abs(mib - middle) for mib in settled) / middle


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--threads", type=int, default=1)
    given = parser.parse_args(arguments)
    if given.requests < _WARM_UP + _EVERY:
        parser.error(f"--requests: at least {_WARM_UP + _EVERY}, of which {_WARM_UP} are warm-up")
    prepare(given.threads)
    began_s, seen = time.monotonic(), dict[int, float]()
    with ChainRouter.from_config(settings()) as router:
        for done, mib in serve(router, given.requests):
            seen[done] = mib
            print(f"{done} requests: {mib:.1f} MiB", file=sys.stderr, flush=True)
        router.instruments.check_integrity()
        cache = vars(router.instruments.engine_state().cache)
    off = drift(seen)
    report = {
        "check": "memory",
        "conditions": conditions(),
        "requests": given.requests,
        "seconds": round(time.monotonic() - began_s),
        "drift": round(off, 4),
        "rss_mib": {done: round(mib, 1) for done, mib in seen.items()},
        "prefix_cache": cache,
    }
    print(json.dumps(report))
    return int(off > _ALLOWED_DRIFT)


if __name__ == "__main__":
    sys.exit(main())
