"""GuideLLM's whole benchmarks against the service.

Runs in an environment that has `guidellm`. Prompts are synthetic, their tokenizer is the target's.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from checks.service.report import Report, run_client

_TOKENIZER = Path(__file__).resolve().parents[2] / "modelpool" / "bundled" / "tiny-8m"
_STREAMS = (1, 4)
_REQUESTS = 12
_OUTPUT_TOKENS = 24


def main(report: Report, url: str, key: str) -> None:
    for path in ("/v1/completions", "/v1/chat/completions"):
        with report.check(f"a benchmark of {path}"), tempfile.TemporaryDirectory() as folder:
            run(url, key, path, Path(folder))
            check_files(Path(folder))


def run(url: str, key: str, path: str, folder: Path) -> None:
    backend = {
        "kind": "openai_http", "target": url, "model": "tiny-8m", "request_format": path,
        "api_key": key,
    }  # fmt: skip
    data = {"kind": "synthetic_text", "prompt_tokens": 48, "output_tokens": _OUTPUT_TOKENS}
    command = [
        str(Path(sys.executable).with_name("guidellm")), "run",
        "--backend", json.dumps(backend),
        "--profile", json.dumps({"kind": "concurrent", "streams": list(_STREAMS)}),
        "--constraint", json.dumps({"kind": "max_requests", "count": _REQUESTS}),
        "--tokenizer", json.dumps({"kind": "huggingface_auto", "model": str(_TOKENIZER)}),
        "--data", json.dumps(data),
        "--disable-console-interactive",
    ]  # fmt: skip
    for kind in ("json", "csv", "html"):
        output = {"kind": kind, "path": str(folder / f"benchmarks.{kind}")}
        command += ["--output", json.dumps(output)]
    subprocess.run(command, check=True)


def check_files(folder: Path) -> None:
    benchmarks = json.loads((folder / "benchmarks.json").read_text())["benchmarks"]
    assert len(benchmarks) == len(_STREAMS)
    for benchmark in benchmarks:
        check_requests(benchmark["requests"])
    for kind in ("csv", "html"):
        assert (folder / f"benchmarks.{kind}").stat().st_size > 0


def check_requests(requests: dict[str, list[dict[str, Any]]]) -> None:
    assert len(requests["successful"]) == _REQUESTS
    assert not requests["errored"], requests["errored"][0]
    assert not requests["incomplete"]
    for one in requests["successful"]:
        assert one["output_tokens"] == _OUTPUT_TOKENS
        assert one["time_to_first_token_ms"] > 0


if __name__ == "__main__":
    run_client("guidellm", main)
