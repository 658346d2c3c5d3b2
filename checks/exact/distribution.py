"""Over many seeds, output tokens are draws from the target's processed distribution.

Given a forced prefix, the token at each output position follows the processed softmax, the next
one follows it given the first, and neither knows the tokens of neighbouring seeds or positions.
All requests are drafted for by a chain of two smaller models. The noise itself is tested too.
"""

import dataclasses
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch

from checks.exact.arguments import open_oracle
from checks.exact.comparison import Tokens
from checks.exact.noise import noise_p_values
from checks.exact.oracle import Oracle
from checks.exact.report import Progress, finish, make_parser, prepare
from specrouter import ChainRouter, SamplingParams, Speculation
from test_support.chi_square import Floats, Ints, fit_p_value, independence_p_value
from test_support.families import NAMES, pool_settings, save_family
from test_support.routers import assert_whole

LEAST_P = 0.001
SEEDS = 20_000
SETTINGS = (
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=0.7, top_k=40, top_p=0.9),
    SamplingParams(temperature=1.3, top_p=0.9),
)
PROMPT = (17, 230, 41, 99, 5, 301, 64)
FORCED = 88  # the output token that the longer prefix holds
BATCH = 32
_NEW = 4  # tokens that a request generates after its prefix, so that drafts have room


@dataclass(frozen=True)
class Stream:
    """Tokens of consecutive seeds after one prefix, and what they should follow."""

    tokens: Ints  # [N, new] at the output positions from the end of the prefix on
    first: Floats  # [V] probabilities of the first
    second: Floats  # [V, V] of the second, given the first


def main(arguments: list[str] | None = None) -> int:
    parser = make_parser(__doc__)
    parser.add_argument("--seeds", type=int, default=SEEDS)
    options = parser.parse_args(arguments)
    prepare(options.threads)
    started = time.monotonic()
    with TemporaryDirectory() as directory:
        p_values, accepted = shared_noise_p_values(Path(directory), options.seeds)
    figures = {
        "seeds": options.seeds,
        "least_p_of_distributions": min(p for t, p in p_values.items() if _is_distribution(t)),
        "least_p_of_others": min(p for t, p in p_values.items() if not _is_distribution(t)),
        "acceptance_length": accepted,
        "failed": failed_tests(p_values),
        "p_values": {test: float(f"{p:.4g}") for test, p in p_values.items()},
    }
    return finish("distribution", not figures["failed"], started, figures)


def shared_noise_p_values(directory: Path, seeds: int) -> tuple[dict[str, float], dict[str, float]]:
    """The p-value of each test, and acceptance lengths."""
    p_values = {f"noise {test}": p for test, p in noise_p_values(seeds).items()}
    accepted = dict[str, float]()
    progress = Progress("distribution", 2 * len(SETTINGS) * seeds)
    with open_small_router(directory) as router:
        oracle = open_oracle(router, "float64")
        for params in SETTINGS:
            label = f"t {params.temperature} k {params.top_k} p {params.top_p}"
            found, length = stream_p_values(router, oracle, params, seeds, progress)
            p_values |= {f"{label}: {test}": p for test, p in found.items()}
            accepted[label] = round(length, 3)
        assert_whole(router)
    return p_values, accepted


def failed_tests(p_values: Mapping[str, float]) -> dict[str, float]:
    """The tests of distributions are held to `LEAST_P` each, the many others together.

    Without that, one honest router in twenty would fail one of them.
    """
    others = sum(not _is_distribution(test) for test in p_values)
    return {
        test: p
        for test, p in p_values.items()
        if p <= (LEAST_P if _is_distribution(test) else LEAST_P / others)
    }


def _is_distribution(test: str) -> bool:
    return test.endswith("distribution")


def open_small_router(directory: Path) -> ChainRouter:
    """A family of three small random models in float64."""
    pool = pool_settings(save_family(directory, noise=0.05))
    engine = {"max_requests": BATCH, "max_model_len": 128, "preload": False}
    return ChainRouter.from_config({"pool": pool, "engine": engine})


def stream_p_values(
    router: ChainRouter,
    oracle: Oracle,
    params: SamplingParams,
    seeds: int,
    progress: Progress,
) -> tuple[dict[str, float], float]:
    """The p-value of each test, and the mean acceptance length."""
    short, short_length = _serve(router, oracle, params, seeds, (), progress)
    long, long_length = _serve(router, oracle, params, seeds, (FORCED,), progress)
    p_values = {
        **{f"position 0, {test}": p for test, p in _own_p_values(short).items()},
        **{f"position 1, {test}": p for test, p in _own_p_values(long).items()},
        **_cross_p_values(short, long),
    }
    return p_values, (short_length + long_length) / 2


def _own_p_values(stream: Stream) -> dict[str, float]:
    """Tests of one stream: its distribution, and neighbouring seeds."""
    tokens, first = stream.tokens[:, 0], stream.first
    size = len(first)
    both = np.bincount(tokens * size + stream.tokens[:, 1], minlength=size * size)
    odd = tokens[1 : len(tokens) - len(tokens) % 2]
    return {
        "distribution": fit_p_value(np.bincount(tokens, minlength=size), first),
        "with the next": fit_p_value(both, (first[:, None] * stream.second).ravel()),
        # Pairs that share no seed: each test's draws are independent of each other.
        "seeds 0-1, 2-3, ...": independence_p_value(tokens[:-1:2], tokens[1::2], first, first),
        "seeds 1-2, 3-4, ...": independence_p_value(odd[:-1:2], odd[1::2], first, first),
    }


def _cross_p_values(short: Stream, long: Stream) -> dict[str, float]:
    """Tests of position 0 against position 1: the same seed, and the two diagonals."""
    here, there = short.tokens[:, 0], long.tokens[:, 0]
    pairs = {
        "same seed, next position": (here, there),
        "next seed, earlier position": (here[1:], there[:-1]),
        "next seed, next position": (here[:-1], there[1:]),
    }
    return {
        test: independence_p_value(one, other, short.first, long.first)
        for test, (one, other) in pairs.items()
    }


def _serve(
    router: ChainRouter,
    oracle: Oracle,
    params: SamplingParams,
    seeds: int,
    prefix: Tokens,
    progress: Progress,
) -> tuple[Stream, float]:
    """What `seeds` requests say after the prefix, and the mean acceptance length."""
    rows = list[Sequence[int]]()
    lengths = list[float]()
    limit = len(prefix) + _NEW
    for start in range(0, seeds, BATCH):
        handles = [
            router.submit(
                PROMPT,
                dataclasses.replace(params, seed=seed, max_new_tokens=limit, ignore_eos=True),
                speculation=Speculation(chain=NAMES, depth=3),
                generated=prefix,
            )
            for seed in range(start, min(start + BATCH, seeds))
        ]
        for handle in handles:
            output = handle.result(timeout=600)
            rows.append(output.token_ids[len(prefix) :])
            lengths.append(output.metrics.acceptance_length)
            progress()
    first, second = _expected(oracle, params, (*PROMPT, *prefix))
    return Stream(np.asarray(rows, dtype=np.int64), first, second), float(np.mean(lengths))


def _expected(oracle: Oracle, params: SamplingParams, text: Tokens) -> tuple[Floats, Floats]:
    """Probabilities [V] of the first token after a text and [V, V] of the second given it."""
    context = torch.tensor([text])
    first = oracle.processed_logits(context, params).softmax(-1)[0]
    size = first.numel()
    longer = torch.cat([context.expand(size, -1), torch.arange(size).unsqueeze(1)], dim=1)
    second = oracle.processed_logits(longer, params, len(text)).softmax(-1)
    return first.numpy(), second.numpy()


if __name__ == "__main__":
    sys.exit(main())
