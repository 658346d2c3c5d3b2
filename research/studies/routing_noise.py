"""The check `noise` of `research.studies.routing`: other load in alternating windows of 20 s.

What it shows: the share of cycles in which the decision stays the same, the speed over target-only,
and that no output changes.
"""

import argparse
import multiprocessing
import statistics
import time
from collections import Counter
from typing import Any

from research.studies.routing_bench import Bench, open_bench, progress
from specrouter import ChainRouter

_WINDOW_S = 20.0


def noise(options: argparse.Namespace) -> dict[str, Any]:
    spawn = multiprocessing.get_context("spawn")
    running, wanted = spawn.Event(), spawn.Event()
    running.set()
    neighbour = spawn.Process(target=_burn, args=(running, wanted), daemon=True)
    neighbour.start()
    bench = open_bench(options)
    windows: list[dict[str, Any]] = []
    try:
        with bench.router:
            runs = _Runs(bench, options.batch[0])
            until = time.monotonic() + options.minutes * 60
            while time.monotonic() < until:
                busy = len(windows) % 2 == 1
                (wanted.set if busy else wanted.clear)()
                progress(f"window {len(windows)}, {'busy' if busy else 'quiet'}")
                windows.append({"busy": busy, **runs.window()})
    finally:
        running.clear()
        wanted.set()
        neighbour.join()
    return {
        "least_same_decision_share": min(w["same_decision_share"] for w in windows),
        "median_same_decision_share": statistics.median(w["same_decision_share"] for w in windows),
        "least_over_off": min(w["adaptive_over_off"] for w in windows),
        "same_texts": all(w["same_texts"] for w in windows),
        "windows": windows,
    }


class _Runs:
    """Adaptive runs and runs of the target alone, in turn, on the same prompts and seeds."""

    def __init__(self, bench: Bench, batch: int) -> None:
        self._bench, self._prompts = bench, bench.texts.mixed(0, batch)
        self._expected: dict[int, list[list[int]]] = {}  # outputs, by seed
        self._number = 0
        for number in range(4):  # warms up
            bench.run(self._prompts, number)

    def window(self) -> dict[str, Any]:
        bench, end = self._bench, time.monotonic() + _WINDOW_S
        ratios, same, counts = [], True, Counter[str]()
        while time.monotonic() < end:
            seed = self._number % 6
            before = bench.router.instruments.statistics().cycles
            ours = bench.run(self._prompts, seed)
            counts.update(_decided(bench.router, before))
            base = bench.run(self._prompts, seed, "target-only")
            same &= ours.texts == self._expected.setdefault(seed, base.texts) == base.texts
            ratios.append(ours.tokens_per_s / base.tokens_per_s)
            self._number += 1
        return {
            "same_decision_share": max(counts.values()) / sum(counts.values()),
            "adaptive_over_off": statistics.median(ratios),
            "same_texts": same,
            "decision": max(counts, key=lambda name: counts[name]),
        }


def _burn(running: Any, wanted: Any) -> None:
    """A neighbour that keeps a core and the memory busy while it is wanted."""
    block = bytearray(2**24)
    while running.is_set():
        if wanted.wait(0.05):
            block[:] = bytes(2**24)
            sum(range(20_000))


def _decided(router: ChainRouter, since: int) -> Counter[str]:
    """How many of the cycles after `since` each chain was in use."""
    last = router.instruments.statistics().cycles
    records = router.instruments.decisions()
    counts: Counter[str] = Counter()
    for index, record in enumerate(records):
        stop = records[index + 1].cycle if index + 1 < len(records) else last
        counts[">".join(record.decision.chain)] += max(
            0, min(stop, last) - max(record.cycle, since)
        )
    return counts
