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
from pathlib import Path

sys.path.insert(0, str(Path.cwd()))  # the work tree's packages, not the installed ones

from specrouter import ChainRouter, SamplingParams


def main() -> int:
    with ChainRouter.from_config(sys.argv[1]) as router:
        for line in sys.stdin:
            asked = json.loads(line)
            params = [
                SamplingParams(
                    asked["new_tokens"], asked["temperature"], seed=seed, ignore_eos=True
                )
                for seed in asked["seeds"]
            ]
            before, started = router.statistics(), time.perf_counter()
            outputs = router.generate(asked["prompts"], params)
            seconds = time.perf_counter() - started
            after = router.statistics()
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
