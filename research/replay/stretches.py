"""Two stretches of AdaServe's artifact (Apache-2.0) for the simulated digest.

They were cut once, of `adaserve_fig8_9_rps4.4_ol256` and `adaserve_fig10_rps4.0_prop0.8`, from the
400th request on: what lies before was used for tuning. Gaps were scaled so that rates differ.
"""

import csv
import gzip
from dataclasses import dataclass
from pathlib import Path

FILE = Path(__file__).parent / "stretches.csv.gz"


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
