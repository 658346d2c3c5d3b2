"""AIPerf's whole benchmarks against the service.

Runs in an environment that has `aiperf`. Prompts are synthetic, their tokenizer is the target's.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from checks.service.report import Report, run_client

_TOKENIZER = Path(__file__).resolve().parents[2] / "modelpool" / "bundled" / "tiny-8m"
_REQUESTS = 10


def main(report: Report, url: str, key: str) -> None:
    for kind in ("chat", "completions"):
        with report.check(f"a benchmark of {kind}"), tempfile.TemporaryDirectory() as folder:
            run(url, key, kind, Path(folder))
            check_files(Path(folder))


def run(url: str, key: str, kind: str, folder: Path) -> None:
    command = [
        str(Path(sys.executable).with_name("aiperf")), "profile",
        "--model", "tiny-8m", "--url", url, "--api-key", key, "--endpoint-type", kind,
        "--streaming", "--tokenizer", str(_TOKENIZER), "--concurrency", "2",
        "--request-count", str(_REQUESTS), "--synthetic-input-tokens-mean", "48",
        "--output-tokens-mean", "24", "--extra-inputs", "ignore_eos:true",
        "--ui", "none", "--artifact-dir", str(folder),
    ]  # fmt: skip
    # Offline it would look for a folder of the hub's; the tokenizer is a file and fetches nothing.
    online = {name: value for name, value in os.environ.items() if name != "HF_HUB_OFFLINE"}
    subprocess.run(command, check=True, env=online)


def check_files(folder: Path) -> None:
    [file] = folder.rglob("profile_export_aiperf.json")
    found = json.loads(file.read_text())
    assert found["request_count"]["avg"] == _REQUESTS
    assert not found.get("error_request_count", {}).get("avg", 0)
    assert found["output_sequence_length"]["avg"] > 0


if __name__ == "__main__":
    run_client("aiperf", main)
