"""`specrouter inflate` on what it cannot inflate: one line, exit code 2, and the source stays."""

from collections.abc import Callable
from pathlib import Path
from shutil import rmtree

import pytest
import torch
from safetensors.torch import save

from specrouter.cli.main import main
from test_support.factories import save_llama


def with_file(name: str, content: bytes) -> Callable[[Path, Path], object]:
    return lambda source, out: (source / name).write_bytes(content)


FAULTS: dict[str, Callable[[Path, Path], object]] = {
    "no source": lambda source, _: rmtree(source),
    "no weights": lambda source, _: (source / "model.safetensors").unlink(),
    "damaged weights": with_file("model.safetensors", b"\0" * 100),
    "other weights": with_file("model.safetensors", save({"a": torch.zeros(1)})),
    "damaged config": with_file("config.json", b"{"),
    "a list as config": with_file("config.json", b"[]"),
    "a config without sizes": with_file(
        "config.json", b'{"model_type": "llama", "hidden_size": "3"}'
    ),
    "a file as target": lambda _, out: out.write_text(""),
    "a folder where a file should be": lambda _, out: (out / "model.safetensors").mkdir(
        parents=True
    ),
    "the source as target": lambda source, out: out.symlink_to(source),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_what_cannot_be_inflated_is_told_in_one_line(
    fault: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, out = save_llama(tmp_path / "source", hidden=40, heads=2, layers=1), tmp_path / "out"
    FAULTS[fault](source, out)
    assert main(["inflate", str(source), str(out), "--parameters", "1"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("specrouter: ")
    assert error.count("\n") == 1
