"""Serves the requests that come in as lines of JSON; run in the work tree that is to be measured.

    python tree_worker.py CONFIG

Contract: uses the public interface only, so that it runs in older work trees too. Each line of the
input is `{"prompts": [...], "seeds": [...], "new_tokens": n, "temperature": t}`; each line of the
output `{"tokens", "seconds", "control_ms", "cycle_ms", "digest"}`. The digest is of the token ids:
equal digests mean equal outputs.
"""

import hashlib
import json
import sys
import time
from dataclasses import fields
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path.cwd()))  # the work tree's packages, not the installed ones

from specrouter import ChainRouter, SamplingParams

_HAS_CACHE = any(field.name == "cache_salt" for field in fields(SamplingParams))


def main() -> int:
    with ChainRouter.from_config(sys.argv[1]) as router:
        instruments: Any = getattr(router, "instruments", router)  # they were the router's own
        for number, line in enumerate(sys.stdin):
            asked = json.loads(line)
            # Prompts come again: what has a prefix cache must not find those of earlier lines.
            own: dict[str, Any] = {"cache_salt": str(number)} if _HAS_CACHE else {}
            params = [
                SamplingParams(
                    max_new_tokens=asked["new_tokens"],
                    temperature=asked["temperature"],
                    seed=seed,
                    ignore_eos=True,
                    **own,
                )
                for seed in asked["seeds"]
            ]
            before, started = instruments.statistics(), time.perf_counter()
            outputs = router.generate(asked["prompts"], params)
            seconds = time.perf_counter() - started
            after = instruments.statistics()
            ids = [list(output.token_ids) for output in outputs]
            told = {
                "tokens": sum(map(len, ids)),
                "seconds": seconds,
                "control_ms": after.control_ms - before.control_ms,
                "cycle_ms": after.cycle_ms - before.cycle_ms,
                "digest": hashlib.sha256(json.dumps(ids).encode()).hexdigest()[:16],
            }
            print(json.dumps(told), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
