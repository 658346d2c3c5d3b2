"""`specrouter inflate` on what it cannot inflate: one line, exit code 2, and the source stays."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from specrouter.cli.main import main
from tests.modelpool.factories import save_llama


def without_weights(source: Path, out: Path) -> None:
    (source / "model.safetensors").unlink()


def with_damaged_weights(source: Path, out: Path) -> None:
    (source / "model.safetensors").write_bytes(b"\0" * 100)


def with_other_weights(source: Path, out: Path) -> None:
    save_file({"a": torch.zeros(1)}, source / "model.safetensors")


def with_a_damaged_config(source: Path, out: Path) -> None:
    (source / "config.json").write_text("{")


def with_a_list_as_config(source: Path, out: Path) -> None:
    (source / "config.json").write_text("[]")


def with_a_config_without_sizes(source: Path, out: Path) -> None:
    (source / "config.json").write_text('{"model_type": "llama", "hidden_size": "32"}')


def to_a_file(source: Path, out: Path) -> None:
    out.write_text("")


def to_a_folder_where_a_file_should_be(source: Path, out: Path) -> None:
    (out / "model.safetensors").mkdir(parents=True)


def to_itself(source: Path, out: Path) -> None:
    out.symlink_to(source)


@pytest.mark.parametrize(
    "fault",
    [
        without_weights,
        with_damaged_weights,
        with_other_weights,
        with_a_damaged_config,
        with_a_list_as_config,
        with_a_config_without_sizes,
        to_a_file,
        to_a_folder_where_a_file_should_be,
        to_itself,
    ],
)
def test_what_cannot_be_inflated_is_told_in_one_line(
    fault: Callable[[Path, Path], None], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, out = save_llama(tmp_path / "source", hidden=40, heads=2, layers=1), tmp_path / "out"
    fault(source, out)
    assert main(["inflate", str(source), str(out), "--parameters", "1"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("specrouter: ")
    assert error.count("\n") == 1
