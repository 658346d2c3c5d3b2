"""The speedup that a server publishes, beside one that is measured from outside.

    python -m checks.real.published FILE [--kind sums] [--temperature 0] [--prompts 24]

One request at a time, each prompt in the order on, off, off, on. Prints the geometric mean of the
time for each token after the first, without drafts over with them, with the bootstrap's interval of
95%, and what `/router/decisions` says afterwards. Fails if the two intervals do not overlap.
"""

import argparse
import itertools
import json
import sys
import urllib.request
from pathlib import Path

import numpy as np

from checks.real.peer import posted, served, specrouter_command
from checks.real.prompts import KINDS, texts

_PORT, _TOKENS, _DRAWS = 9315, 192, 2000
_ON = {"reuse_outputs": False}


def main() -> int:
    parser = argparse.ArgumentParser(prog="checks.real.published", description=__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("--kind", choices=[*KINDS, "edits"], default="sums")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--prompts", type=int, default=24)
    given = parser.parse_args()
    prompts = itertools.islice(itertools.cycle(texts(given.kind)), given.prompts + 1)
    logs = list[float]()
    with served(specrouter_command(given.file, _PORT), _PORT) as server:
        for seed, prompt in enumerate(prompts):
            body = {
                "prompt": prompt,
                "max_new_tokens": _TOKENS,
                "temperature": given.temperature,
                "seed": seed,
                "prefix_cache": False,
                "ignore_eos": True,
            }
            on, off, again_off, again_on = (
                posted(f"{server.url}/generate", {**body, "speculation": how})
                for how in (_ON, "off", "off", _ON)
            )
            assert on["token_ids"] == off["token_ids"], "drafts have changed a text"
            alone, drafted = (
                sum(one["metrics"]["tpot_ms"] for one in turns)
                for turns in ((off, again_off), (on, again_on))
            )
            if seed:  # the first prompt is not counted
                logs.append(float(np.log(alone / drafted)))
        with urllib.request.urlopen(f"{server.url}/router/decisions", timeout=60) as answer:
            published = json.load(answer)["speedups"]["1"]
    draws = np.random.default_rng(0).choice(np.array(logs), (_DRAWS, len(logs))).mean(axis=1)
    low, high = np.exp(np.quantile(draws, (0.025, 0.975)))
    print(f"from outside: {np.exp(np.mean(logs)):.3f} [{low:.3f}, {high:.3f}]")
    print(f"published: {published}")
    return 0 if low <= published["high"] and published["low"] <= high else 1


if __name__ == "__main__":
    sys.exit(main())
