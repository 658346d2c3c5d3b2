"""Over many seeds, output tokens are draws from the target's processed distribution.

Given a forced prefix, the token at each output position follows the processed softmax, the next
one follows it given the first, and neither knows the tokens of neighbouring seeds or positions.
All requests are drafted for by a chain of two smaller models. The noise itself is tested too.

With `--verification rejection` so do whole texts of a few tokens, drafted for by every kind of
chain; the first of their tokens is the target's own, the others are proposed, and one more may be.
"""

import dataclasses
import sys
import time
from collections import Counter
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
from specrouter.request.params import Chain
from test_support.chi_square import Floats, Ints, fit_p_value, independence_p_value
from test_support.families import NAMES, pool_settings, save_family
from test_support.routers import assert_whole

LEAST_P = 0.001
SEEDS = {"shared-noise": 20_000, "rejection": 2_000}
SETTINGS = (
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=0.7, top_k=40, top_p=0.9),
    SamplingParams(temperature=1.3, top_p=0.9),
)
PROMPT = (17, 230, 41, 99, 5, 301, 64)
FORCED = 88  # the output token that the longer prefix holds
BATCH = 32
_NEW = 4  # tokens that a request generates after its prefix, so that drafts have room
REJECTION_CHAINS: tuple[Chain, ...] = (
    ("small", "target"),
    NAMES,
    ("ngram", "target"),
    ("ngram", "middle", "target"),
)
REJECTION_SETTINGS = (  # of which no token has more than three successors
    SamplingParams(temperature=1.0, top_k=3),
    # A text of three words, which repeats itself.
    SamplingParams(
        temperature=1.5,
        top_k=3,
        logit_bias={17: 50.0, 230: 50.0, 41: 50.0},
        presence_penalty=0.5,
        frequency_penalty=0.2,
    ),
)
_TEXT = 5  # tokens of a text: the target's, a draft of three, and one more


@dataclass(frozen=True)
class Stream:
    """Tokens of consecutive seeds after one prefix, and what they should follow."""

    tokens: Ints  # [N, new] at the output positions from the end of the prefix on
    first: Floats  # [V] probabilities of the first
    second: Floats  # [V, V] of the second, given the first


def main(arguments: list[str] | None = None) -> int:
    parser = make_parser(__doc__)
    parser.add_argument("--verification", choices=tuple(SEEDS), default="shared-noise")
    parser.add_argument("--seeds", type=int, help=f"by default {SEEDS}")
    options = parser.parse_args(arguments)
    prepare(options.threads)
    started = time.monotonic()
    seeds = options.seeds or SEEDS[options.verification]
    check = rejection_p_values if options.verification == "rejection" else shared_noise_p_values
    with TemporaryDirectory() as directory:
        p_values, accepted = check(Path(directory), seeds)
    figures = {
        "verification": options.verification,
        "seeds": seeds,
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


def rejection_p_values(directory: Path, seeds: int) -> tuple[dict[str, float], dict[str, float]]:
    """`shared_noise_p_values` of the other rule: of whole texts, and of what precedes what."""
    p_values, accepted = dict[str, float](), dict[str, float]()
    settings = (*REJECTION_SETTINGS, SETTINGS[0])
    progress = Progress("rejection", len(REJECTION_CHAINS) * len(settings) * seeds)
    with open_small_router(directory, verification="rejection", ngram=True) as router:
        oracle = open_oracle(router, "float64")
        for params in settings:
            prompt = own_prompt(oracle, params)
            is_narrow = params in REJECTION_SETTINGS
            new = _TEXT if is_narrow else _NEW
            law = text_probabilities(oracle, prompt, params, new) if is_narrow else {}
            first, second = _expected(oracle, params, prompt)
            for chain in REJECTION_CHAINS:
                label = f"{'>'.join(chain)} t {params.temperature} k {params.top_k}"
                tokens, length = serve_seeds(
                    router, prompt, params, seeds, chain, new=new, progress=progress
                )
                accepted[label] = round(length, 3)
                found = _own_p_values(Stream(tokens, first, second))
                if is_narrow:
                    found["texts, distribution"] = text_p_value(tokens, law)
                p_values |= {f"{label}: {test}": p for test, p in found.items()}
        assert_whole(router)
    return p_values, accepted


def own_prompt(oracle: Oracle, params: SamplingParams) -> Tokens:
    """What the target says itself, so that the text drafts as well as it can."""
    params = dataclasses.replace(params, max_new_tokens=64, seed=0, ignore_eos=True)
    return (*PROMPT, *oracle.tokens(PROMPT, params))


def text_probabilities(
    oracle: Oracle, prompt: Tokens, params: SamplingParams, count: int
) -> dict[Tokens, float]:
    """Each possible text of `count` tokens after the prompt, and how probable it is."""
    texts: dict[Tokens, float] = {(): 1.0}
    params = dataclasses.replace(params, ignore_eos=True)
    for _ in range(count):
        contexts = torch.tensor([[*prompt, *text] for text in texts])
        nexts = oracle.processed_logits(contexts, params, len(prompt)).softmax(-1)
        texts = {
            (*text, token): p * float(row[token])
            for (text, p), row in zip(texts.items(), nexts, strict=True)
            for token in row.nonzero()[:, 0].tolist()
        }
    return texts


def text_p_value(tokens: Ints, law: Mapping[Tokens, float]) -> float:
    """Whether whole texts [N, count] follow their probabilities; 0 if one of them has none."""
    seen = Counter(tuple(text) for text in tokens.tolist())
    if not seen.keys() <= law.keys():
        return 0.0
    counts = np.array([seen[text] for text in law])
    return fit_p_value(counts, np.array(list(law.values())))


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


def open_small_router(
    directory: Path, verification: str = "shared-noise", ngram: bool = False
) -> ChainRouter:
    """A family of three small random models in float64."""
    pool = pool_settings(save_family(directory, noise=0.05))
    if ngram:
        pool["models"].append({"name": "ngram", "source": "ngram"})
    engine = {
        "max_requests": BATCH,
        "max_model_len": 128,
        "verification": verification,
        "preload": False,
    }
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
    tokens, length = serve_seeds(
        router, PROMPT, params, seeds, NAMES, prefix=prefix, progress=progress
    )
    first, second = _expected(oracle, params, (*PROMPT, *prefix))
    return Stream(tokens, first, second), length


def serve_seeds(
    router: ChainRouter,
    prompt: Tokens,
    params: SamplingParams,
    seeds: int,
    chain: Chain,
    *,
    new: int = _NEW,
    prefix: Tokens = (),
    progress: Progress,
) -> tuple[Ints, float]:
    """What `seeds` requests say after the prefix, [N, new], and the mean acceptance length."""
    rows = list[Sequence[int]]()
    lengths = list[float]()
    limit = len(prefix) + new
    for start in range(0, seeds, BATCH):
        handles = [
            router.submit(
                prompt,
                dataclasses.replace(params, seed=seed, max_new_tokens=limit, ignore_eos=True),
                speculation=Speculation(chain=chain, depth=3),
                generated=prefix,
            )
            for seed in range(start, min(start + BATCH, seeds))
        ]
        for handle in handles:
            output = handle.result(timeout=600)
            rows.append(output.token_ids[len(prefix) :])
            lengths.append(output.metrics.acceptance_length)
            progress()
    return np.asarray(rows, dtype=np.int64), float(np.mean(lengths))


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
