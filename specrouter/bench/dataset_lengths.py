"""Poisson arrivals with the lengths of the datasets that SpecRouter's evaluation uses.

Contract: pure; a seed gives one list of arrivals. Each request is of one of four datasets, all
equally likely. Its prompt's length is drawn from that dataset's, by linear interpolation between
deciles, so nothing of the datasets is needed to run this. No request has an objective.

Lengths are in tokens of the bundled models' tokenizer. Prompts: GSM8K test questions (300,
openai/grade-school-math), HumanEval (82, openai/human-eval), first turns of MT-Bench (40,
lm-sys/FastChat), MGSM in German (100, google-research/url-nlp). Outputs: the paper publishes no
lengths. The two mathematical datasets get those of GSM8K's 7,473 training answers, the other two
the 256 tokens of AdaServe's traces.
Source: SpecRouter, section 6.
"""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from specrouter.bench.traces import Arrival


@dataclass(frozen=True)
class LengthDeciles:
    """The least length, the nine deciles and the greatest length, in tokens."""

    input_tokens: tuple[int, ...]
    output_tokens: tuple[int, ...]


_ANSWERS = (33, 72, 86, 99, 111, 124, 141, 159, 182, 218, 496)
DATASETS: Mapping[str, LengthDeciles] = {
    "gsm8k": LengthDeciles((31, 47, 54, 62, 68, 74, 79, 88, 104, 124, 188), _ANSWERS),
    "humaneval": LengthDeciles((61, 95, 103, 123, 137, 145, 159, 181, 197, 269, 362), (256,) * 11),
    "mt_bench": LengthDeciles((23, 31, 36, 40, 46, 56, 77, 93, 122, 237, 563), (256,) * 11),
    "mgsm": LengthDeciles((67, 92, 100, 115, 132, 142, 153, 179, 200, 235, 350), _ANSWERS),
}


def poisson_of_datasets(rate_per_s: float, count: int, seed: int) -> list[Arrival]:
    """Arrivals with exponential gaps, each of one of `DATASETS`; their category is its name."""
    draw = random.Random(f"datasets {seed}")
    at_s, arrivals = 0.0, []
    for _ in range(count):
        name = draw.choice(list(DATASETS))
        lengths = DATASETS[name]
        read, made = (
            _drawn(deciles, draw) for deciles in (lengths.input_tokens, lengths.output_tokens)
        )
        arrivals.append(Arrival(at_s, name, read, made))
        at_s += draw.expovariate(rate_per_s)
    return arrivals


def _drawn(deciles: Sequence[int], draw: random.Random) -> int:
    return round(float(np.interp(10 * draw.random(), range(len(deciles)), deciles)))
