"""`specrouter verify`: receipts made with drafts by the kernel for AVX2 hold elsewhere."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from modelpool.kernels.library import KERNELS, linear_kernels
from specrouter import ChainRouter, SamplingParams
from specrouter.cli.main import main
from specrouter.cli.verify import _config
from specrouter.request.receipt import Receipt

RECEIPTS = sorted(Path(__file__).parent.glob("*.receipt.json"))
needs_kernels = pytest.mark.skipif(linear_kernels() is None, reason="no C library here")


def read(name: str) -> dict[str, Any]:
    [path] = [one for one in RECEIPTS if one.name.startswith(name)]
    return dict(json.loads(path.read_text()))


def verify(path: Path, receipt: object) -> int:
    path.write_text(json.dumps(receipt))
    return main(["verify", str(path)])


@needs_kernels
def test_a_kept_receipt_holds_and_a_changed_one_does_not(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kept, path = read("sampled"), tmp_path / "receipt.json"
    assert verify(path, {"choices": [{"index": 0, "receipt": kept}]}) == 0
    assert capsys.readouterr().out == "equal: 64 tokens, and the bits of their logits\n"
    kept["token_ids"][9] += 1
    assert verify(path, kept) == 1
    assert capsys.readouterr().out.startswith("not equal: token 9 is ")
    kept["served"]["files"]["config.json"] = "0" * 64
    assert verify(path, kept) == 1
    assert capsys.readouterr().out.startswith("other files: config.json")


def test_nothing_that_a_receipt_says_runs_code() -> None:
    kept = read("greedy")
    kept["served"]["settings"] |= {"trust_remote_code": True, "pinned": True, "device": "cuda"}
    [member] = _config(Receipt.read(json.dumps(kept)), None)["pool"]["models"]
    assert member.keys() == {"name", "source", "weights", "dtype"}


def test_the_pools_settings_that_bits_depend_on_are_those_of_the_receipt(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    member = {"name": "8m", "source": "bundled:tiny-8m", "dtype": "float32"}
    pool = {"models": [member], "target": "8m", "attention": "path", "pack_weights": False}
    params = SamplingParams(max_new_tokens=8, receipt=True, ignore_eos=True)
    with ChainRouter.from_config({"pool": pool, "engine": {"max_model_len": 64}}) as router:
        receipt = router.generate([5, 17, 300], params)[0].receipt
    assert receipt is not None
    asked = _config(receipt, None)["pool"]
    assert (asked["attention"], asked["pack_weights"]) == ("path", False)
    assert verify(tmp_path / "receipt.json", json.loads(receipt.model_dump_json())) == 0
    assert capsys.readouterr().out.startswith("equal: 8 tokens")


@needs_kernels
@pytest.mark.exact
@pytest.mark.parametrize("path", RECEIPTS, ids=lambda path: path.name.partition(".")[0])
@pytest.mark.parametrize("kernel", KERNELS)
def test_receipts_hold_with_every_kernel(kernel: str, path: Path) -> None:
    kernels = linear_kernels()
    if kernels is None or kernel not in kernels.available:
        pytest.skip("this CPU does not have it")
    command = (sys.executable, "-m", "specrouter", "verify", str(path))
    # Of torch's own operators none may matter either.
    environment = {**os.environ, "SPECROUTER_KERNEL": kernel, "ATEN_CPU_CAPABILITY": "default"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "RECEIPT: cannot read"),
        ('{"text": "hello"}', "has no receipt: ask with `receipt: true`"),
        ('{"choices": []}', "has no receipt"),
        ('{"choices": [{}, {}]}', "has 2 choices"),
        (json.dumps(read("greedy") | {"format": 2}), "receipt.format"),
        (json.dumps(read("greedy") | {"token_ids": []}), "receipt.token_ids"),
        (json.dumps(read("greedy") | {"params": {"n": 3}}), "receipt.params.n"),
        (json.dumps(read("greedy") | {"params": {"top_p": 7}}), "top_p"),
    ],
    ids=["json", "answer", "nothing", "several", "format", "empty", "parameter", "range"],
)
def test_what_is_no_receipt_is_one_line(
    text: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "receipt.json"
    path.write_text(text)
    assert main(["verify", str(path)]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1
