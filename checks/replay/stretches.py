"""Stretches of traces for simulated digests: 24, each of some requests that follow one another.

`python -m checks.replay.stretches FOLDER` cuts them from the traces again. They are of
- AdaServe's artifact (Apache-2.0): `adaserve_fig8_9_rps{2.8,3.6,4.4}_ol256` and
  `adaserve_fig10_rps4.0_prop{0.3,0.8}`,
- the Azure LLM inference traces of 2023 (CC BY 4.0, AzurePublicDataset): conversations and code,
  with AdaServe's objectives for chat and coding, and prompts cut to 1,024 tokens,
from the 400th request on: what lies before was used for tuning. Gaps are scaled so that rates
differ, and for Azure's, whose requests are of other lengths, so that the load is about AdaServe's.

Stretches of even numbers are for choosing constants, those of odd numbers for judging; of the seeds
of acceptance 0 to 7 choose and 8 to 15 judge. That was fixed before anybody tuned with them.
"""

import csv
import gzip
import sys
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

FILE = Path(__file__).parent / "stretches.csv.gz"
REQUESTS = 160  # of a stretch
CHOOSING_SEEDS, JUDGING_SEEDS = range(8), range(8, 16)

_FIRST = 400
_LONGEST = 1024
# Trace, requests to skip after the first ones, factor on gaps.
_CUTS: tuple[tuple[str, int, float], ...] = (
    ("adaserve_fig8_9_rps2.8_ol256", 0, 1.0),
    ("adaserve_fig8_9_rps2.8_ol256", 160, 1.0),
    ("adaserve_fig8_9_rps2.8_ol256", 300, 0.8),
    ("adaserve_fig8_9_rps2.8_ol256", 440, 0.8),
    ("adaserve_fig8_9_rps3.6_ol256", 0, 1.0),
    ("adaserve_fig8_9_rps3.6_ol256", 200, 1.0),
    ("adaserve_fig8_9_rps3.6_ol256", 400, 0.9),
    ("adaserve_fig8_9_rps3.6_ol256", 600, 0.9),
    ("adaserve_fig8_9_rps4.4_ol256", 0, 1.0),
    ("adaserve_fig8_9_rps4.4_ol256", 250, 1.0),
    ("adaserve_fig8_9_rps4.4_ol256", 500, 1.1),
    ("adaserve_fig8_9_rps4.4_ol256", 800, 1.1),
    ("adaserve_fig10_rps4.0_prop0.3", 0, 1.0),
    ("adaserve_fig10_rps4.0_prop0.3", 300, 1.0),
    ("adaserve_fig10_rps4.0_prop0.3", 600, 1.15),
    ("adaserve_fig10_rps4.0_prop0.8", 0, 1.0),
    ("adaserve_fig10_rps4.0_prop0.8", 300, 1.0),
    ("adaserve_fig10_rps4.0_prop0.8", 600, 1.15),
    ("azure_2023_conv", 0, 1.8),
    ("azure_2023_conv", 3000, 1.8),
    ("azure_2023_conv", 6000, 2.2),
    ("azure_2023_code", 0, 5.0),
    ("azure_2023_code", 1500, 0.3),
    ("azure_2023_code", 3000, 4.0),
)
_AZURE = {"azure_2023_conv": ("chat", -50.0), "azure_2023_code": ("coding", 1.2)}


@dataclass(frozen=True)
class Arrival:
    """`slo`: as AdaServe's traces have it: times the time of a token of a request alone, or, where
    negative, milliseconds on a machine where that is 30."""

    at_s: float
    category: str
    input_tokens: int
    output_tokens: int
    slo: float


def load_stretches(path: Path = FILE) -> list[list[Arrival]]:
    found: list[list[Arrival]] = []
    with gzip.open(path, "rt", encoding="ascii", newline="") as file:
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


def is_for_choosing(stretch: int) -> bool:
    return stretch % 2 == 0


def cut(folder: Path, path: Path = FILE) -> None:
    """Writes the file anew from the traces."""
    with path.open("wb") as raw, gzip.GzipFile(fileobj=raw, mode="wb", mtime=0) as packed:
        lines = ["stretch,at_ms,category,input_tokens,output_tokens,slo"]
        for number, (name, skip, factor) in enumerate(_CUTS):
            first = _FIRST + skip
            those = _read(folder / f"{name}.csv")[first : first + REQUESTS]
            assert len(those) == REQUESTS, name
            for one in those:
                at_ms = round((one.at_s - those[0].at_s) * factor * 1000)
                lengths = f"{one.input_tokens},{one.output_tokens}"
                lines.append(f"{number},{at_ms},{one.category},{lengths},{one.slo:g}")
        packed.write("\n".join(lines).encode() + b"\n")


def _read(path: Path) -> list[Arrival]:
    with path.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    azure = _AZURE.get(path.stem)
    found = [_adaserve(row) if azure is None else _azure(row, *azure) for row in rows]
    return sorted(found, key=lambda arrival: arrival.at_s)


def _adaserve(row: dict[str, str]) -> Arrival:
    at_s, slo = float(row["emission_time_ms"]) / 1000, float(row["slo_ratio"])
    tokens = int(row["input_tokens"]), int(row["output_tokens"])
    return Arrival(at_s, row["category"], *tokens, slo)


def _azure(row: dict[str, str], category: str, slo: float) -> Arrival:
    at_s = datetime.fromisoformat(row["TIMESTAMP"][:26]).timestamp()
    read, made = int(row["ContextTokens"]), int(row["GeneratedTokens"])
    return Arrival(at_s, category, min(read, _LONGEST), max(made, 2), slo)


if __name__ == "__main__":
    cut(Path(sys.argv[1]))
