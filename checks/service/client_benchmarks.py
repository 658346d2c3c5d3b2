"""Whole benchmarks of others against the service: GuideLLM's, and AIPerf's with its section on
speculative decoding.

Prompts are synthetic, their tokenizer is the target's. What AIPerf adds up of all requests'
`metrics.speculative_decoding` is what the service has counted.
"""

import json
import os
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from checks.service.client import MODEL, TARGET, Checks

_STREAMS, _REQUESTS, _OUTPUT_TOKENS = (1, 4), 12, 24  # of GuideLLM
_AIPERF_REQUESTS = 100
_COUNTED = {  # by AIPerf, and by the service under vLLM's names
    "total_spec_decode_steps": "num_drafts",
    "total_draft_tokens": "num_draft_tokens",
    "total_accepted_draft_tokens": "num_accepted_tokens",
}


def _run(program: str, *options: str, environment: Mapping[str, str] | None = None) -> None:
    command = [str(Path(sys.executable).with_name(program)), *options]
    subprocess.run(command, check=True, env=environment)


def guidellm_checks(url: str, key: str) -> Checks:
    for path in ("/v1/completions", "/v1/chat/completions"):
        yield f"a benchmark of {path}", partial(_guidellm, url, key, path)


def _guidellm(url: str, key: str, path: str) -> None:
    given: dict[str, dict[str, Any]] = {
        "backend": {
            "kind": "openai_http", "target": url, "model": MODEL, "request_format": path,
            "api_key": key,
        },
        "profile": {"kind": "concurrent", "streams": list(_STREAMS)},
        "constraint": {"kind": "max_requests", "count": _REQUESTS},
        "tokenizer": {"kind": "huggingface_auto", "model": str(TARGET)},
        "data": {
            "kind": "synthetic_text", "prompt_tokens": 48, "output_tokens": _OUTPUT_TOKENS,
        },
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        files = {kind: Path(folder) / f"benchmarks.{kind}" for kind in ("json", "csv", "html")}
        outputs = [("output", {"kind": kind, "path": str(file)}) for kind, file in files.items()]
        options = [
            part
            for name, value in (*given.items(), *outputs)
            for part in (f"--{name}", json.dumps(value))
        ]
        _run("guidellm", "run", *options, "--disable-console-interactive")
        assert all(file.stat().st_size > 0 for file in files.values())
        benchmarks = json.loads(files["json"].read_text())["benchmarks"]
    assert len(benchmarks) == len(_STREAMS)
    for requests in (benchmark["requests"] for benchmark in benchmarks):
        assert len(requests["successful"]) == _REQUESTS
        assert not requests["errored"], requests["errored"][0]
        assert not requests["incomplete"]
        for one in requests["successful"]:
            assert one["output_tokens"] == _OUTPUT_TOKENS
            assert one["time_to_first_token_ms"] > 0


def aiperf_checks(url: str, key: str) -> Checks:
    for kind in ("chat", "completions"):
        yield f"a benchmark of {kind}", partial(_aiperf, url, key, kind)


def _aiperf(url: str, key: str, kind: str) -> None:
    options = [
        "profile", "--model", MODEL, "--url", url, "--api-key", key, "--endpoint-type", kind,
        "--streaming", "--tokenizer", str(TARGET), "--concurrency", "2",
        "--request-count", str(_AIPERF_REQUESTS), "--synthetic-input-tokens-mean", "48",
        "--output-tokens-mean", "24", "--extra-inputs", "ignore_eos:true",
        # A router that is left to itself may draft nothing for so small a target.
        "--extra-inputs", json.dumps({"speculation": {"chain": ["tiny-1m", MODEL]}}),
        "--use-server-token-count",  # asks for the chunk with the usage, which has the metrics
        "--record-processors", "1", "--ui", "none",
    ]  # fmt: skip
    # Offline it would look for a folder of the hub's; the tokenizer is a file and fetches nothing.
    online = {name: value for name, value in os.environ.items() if name != "HF_HUB_OFFLINE"}
    before = _counted(url, key)
    with tempfile.TemporaryDirectory() as folder:
        _run("aiperf", *options, "--artifact-dir", folder, environment=online)
        [file] = Path(folder).rglob("profile_export_aiperf.json")
        found = json.loads(file.read_text())
    counted = {name: count - before[name] for name, count in _counted(url, key).items()}
    assert found["request_count"]["avg"] == _AIPERF_REQUESTS
    assert not found.get("error_request_count", {}).get("avg", 0)
    assert found["output_sequence_length"]["avg"] > 0
    assert counted["total_spec_decode_steps"] > 0
    assert {name: found[name]["avg"] for name in counted} == counted
    assert found["spec_decode_acceptance_length"]["avg"] > 1


def _counted(url: str, key: str) -> dict[str, float]:
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
