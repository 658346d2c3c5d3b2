"""AIPerf's whole benchmarks against the service, and its section on speculative decoding.

Runs in an environment that has `aiperf`. Prompts are synthetic, their tokenizer is the target's.
What it adds up of all requests' `metrics.speculative_decoding` is what the service has counted.
"""

import json
import os
import subprocess
import sys
import tempfile
import urllib.request
from pathlib import Path

from checks.service.report import Report, run_client

_TOKENIZER = Path(__file__).resolve().parents[2] / "modelpool" / "bundled" / "tiny-8m"
_REQUESTS = 100
_COUNTED = {  # by AIPerf, and by the service under vLLM's names
    "total_spec_decode_steps": "num_drafts",
    "total_draft_tokens": "num_draft_tokens",
    "total_accepted_draft_tokens": "num_accepted_tokens",
}


def main(report: Report, url: str, key: str) -> None:
    for kind in ("chat", "completions"):
        with report.check(f"a benchmark of {kind}"), tempfile.TemporaryDirectory() as folder:
            before = counted(url, key)
            run(url, key, kind, Path(folder))
            after = counted(url, key)
            check_files(Path(folder), {name: after[name] - before[name] for name in after})


def run(url: str, key: str, kind: str, folder: Path) -> None:
    command = [
        str(Path(sys.executable).with_name("aiperf")), "profile",
        "--model", "tiny-8m", "--url", url, "--api-key", key, "--endpoint-type", kind,
        "--streaming", "--tokenizer", str(_TOKENIZER), "--concurrency", "2",
        "--request-count", str(_REQUESTS), "--synthetic-input-tokens-mean", "48",
        "--output-tokens-mean", "24", "--extra-inputs", "ignore_eos:true",
        # A router that is left to itself may draft nothing for so small a target.
        "--extra-inputs", json.dumps({"speculation": {"chain": ["tiny-1m", "tiny-8m"]}}),
        "--use-server-token-count",  # asks for the chunk with the usage, which has the metrics
        "--record-processors", "1", "--ui", "none", "--artifact-dir", str(folder),
    ]  # fmt: skip
    # Offline it would look for a folder of the hub's; the tokenizer is a file and fetches nothing.
    online = {name: value for name, value in os.environ.items() if name != "HF_HUB_OFFLINE"}
    subprocess.run(command, check=True, env=online)


def counted(url: str, key: str) -> dict[str, float]:
    """The service's totals, by AIPerf's names of them."""
    asked = urllib.request.Request(f"{url}/metrics", headers={"Authorization": f"Bearer {key}"})
    with urllib.request.urlopen(asked, timeout=10) as answer:
        lines = answer.read().decode().splitlines()
    return {
        theirs: sum(
            float(line.split()[-1])
            for line in lines
            if line.startswith(f"vllm:spec_decode_{ours}_total{{")
        )
        for theirs, ours in _COUNTED.items()
    }


def check_files(folder: Path, service: dict[str, float]) -> None:
    [file] = folder.rglob("profile_export_aiperf.json")
    found = json.loads(file.read_text())
    assert found["request_count"]["avg"] == _REQUESTS
    assert not found.get("error_request_count", {}).get("avg", 0)
    assert found["output_sequence_length"]["avg"] > 0
    assert service["total_spec_decode_steps"] > 0
    assert {name: found[name]["avg"] for name in service} == service
    assert found["spec_decode_acceptance_length"]["avg"] > 1


if __name__ == "__main__":
    run_client("aiperf", main)
