"""Stretches of traces for simulated digests: 24, each of some requests that follow one another.

They were cut once (by this file as it was on 2026-11-24, with the place of each), four of each of
the first three traces and three of each of the others, of
- AdaServe's artifact (Apache-2.0): `adaserve_fig8_9_rps{2.8,3.6,4.4}_ol256` and
  `adaserve_fig10_rps4.0_prop{0.3,0.8}`,
- the Azure LLM inference traces of 2023 (CC BY 4.0, AzurePublicDataset): conversations and code,
  with AdaServe's objectives for chat and coding, and prompts cut to 1,024 tokens,
from the 400th request on: what lies before was used for tuning. Gaps were scaled so that rates
differ, and for Azure's, whose requests are of other lengths, so that the load is about AdaServe's.

Stretches of even numbers are for choosing constants, those of odd numbers for judging; of the seeds
of acceptance 0 to 7 choose and 8 to 15 judge. That was fixed before anybody tuned with them.
"""

import csv
import gzip
from dataclasses import dataclass
from pathlib import Path

FILE = Path(__file__).parent / "stretches.csv.gz"
REQUESTS = 160  # of a stretch


@dataclass(frozen=True)
class Arrival:
    """`slo`: as AdaServe's traces have it: times the time of a token of a request alone, or, where
    negative, milliseconds on a machine where that is 30."""

    at_s: float
    category: str
    input_tokens: int
    output_tokens: int
    slo: float


def load_stretches() -> list[list[Arrival]]:
    found: list[list[Arrival]] = []
    with gzip.open(FILE, "rt", encoding="ascii", newline="") as file:
        for row in csv.DictReader(file):
            if int(row["stretch"]) == len(found):
                found.append([])
            found[-1].append(
                Arrival(
                    int(row["at_ms"]) / 1000,
                    row["category"],
                    int(row["input_tokens"]),
                    int(row["output_tokens"]),
                    float(row["slo"]),
                )
            )
    return found
