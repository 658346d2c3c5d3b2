"""What a newcomer meets: the first model is fetched, served, and answers; again without network.

    python -m checks.real.first_start

Runs what `make serve` runs, twice, prints the answer to a question and the seconds to the first
one, and fails where the answer is wrong or the second start needs the network.
"""

import os
import sys
from typing import Any

from checks.real.peer import posted, served

_PORT = 9314
_SERVE = '"$0" -m specrouter serve "$("$0" -m modelpool.checkpoint.released smollm2)" --port "$1"'
_NOWHERE = "http://127.0.0.1:9"
_OFFLINE = {
    "PIP_NO_INDEX": "1",
    "HF_ENDPOINT": _NOWHERE,
    **{f"{scheme}_proxy": _NOWHERE for scheme in ("http", "https", "all")},
    "no_proxy": "127.0.0.1",
}


def main() -> int:
    for name, more in (("with the network", {}), ("without", _OFFLINE)):
        command = ["sh", "-c", f"exec {_SERVE}", sys.executable, str(_PORT)]
        with served(command, _PORT, {**os.environ, **more}) as server:
            answer = _asked(server.url)
        print(f"{name}: {server.start_s:.1f} s to the first answer; {answer}", flush=True)
        assert answer["model"] == "smollm2"
        assert "Paris" in answer["text"]
    return 0


def _asked(url: str) -> dict[str, Any]:
    messages = [{"role": "user", "content": "Tell me the capital of France."}]
    body = {"messages": messages, "max_tokens": 32, "temperature": 0}
    answer = posted(f"{url}/v1/chat/completions", body)
    return {"model": answer["model"], "text": answer["choices"][0]["message"]["content"]}


if __name__ == "__main__":
    sys.exit(main())
