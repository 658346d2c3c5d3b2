"""An inflated member is written once, whole or not at all, and computes what its source does."""

import logging
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

import modelpool.inflate.inflated
from modelpool import ConfigError, ModelPool
from modelpool.checkpoint.cached_folder import damage
from modelpool.inflate.inflate import inflate
from modelpool.inflate.inflated import inflated_source
from modelpool.inflate.llama_sizes import Growth
from test_support.cache_damage import OF_FILE, OF_FOLDER, Damage
from test_support.factories import VOCAB_SIZE, edit_config, save_gpt2, save_llama
from tests.modelpool.refused import refused

FIELD = "pool.models[0]"
PARAMETERS = 1_000_000


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SPECROUTER_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "inflated"


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Inflation in this process, by little; the folders that it wrote."""
    written = []

    def elsewhere(source: Path, out: Path, min_parameters: int, dtype: str) -> None:
        inflate(source, out, Growth(width_exponent=0, layers=3, mlp=64), dtype=dtype)
        written.append(out)

    monkeypatch.setattr(modelpool.inflate.inflated, "_inflate_elsewhere", elsewhere)
    return written


def inflated(source: Path, dtype: Any = "auto", parameters: int = PARAMETERS) -> Path:
    return inflated_source(source, parameters, dtype=dtype, field=FIELD)


def test_a_pool_inflates_its_member_in_another_process_once(
    cache: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source = save_llama(tmp_path / "source", hidden=40, heads=2, kv_heads=1, layers=1)
    models: list[dict[str, Any]] = [
        {"name": "plain", "source": str(source), "dtype": "float32"},
        {"name": "large", "source": str(source), "dtype": "float32", "inflate_to": PARAMETERS},
    ]
    with caplog.at_level(logging.INFO, "modelpool"):
        pool = ModelPool.from_config({"target": "large", "models": models})
        assert "writing" in caplog.text
        caplog.clear()
        ModelPool.from_config({"target": "large", "models": models})
        assert "writing" not in caplog.text
    assert pool.path("large").parent == cache
    assert len(list(cache.iterdir())) == 1
    assert pool.parameter_count("large") >= PARAMETERS > pool.parameter_count("plain")
    tokens = torch.arange(20).unsqueeze(0) * 7 % VOCAB_SIZE
    plain, large = (pool.get(name).model for name in ("plain", "large"))
    with torch.inference_mode():
        for model in (plain, large):
            model.set_attn_implementation("sdpa")
        assert torch.allclose(plain(tokens).logits, large(tokens).logits, atol=1e-3)


def test_threads_that_inflate_the_same_all_find_a_whole_folder(
    cache: Path, quick: list[Path], tmp_path: Path
) -> None:
    source = save_llama(tmp_path / "source", dtype="float32")
    with ThreadPoolExecutor(4) as executor:
        found = set(executor.map(inflated, [source] * 4))
    assert list(cache.iterdir()) == list(found)
    assert (found.pop() / "config.json").is_file()


def test_a_failure_leaves_nothing_behind_and_names_the_field(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = save_llama(tmp_path / "source")
    monkeypatch.setattr(modelpool.inflate.inflated, "_PROGRAM", "raise OSError('no space left')")
    with refused(f"{FIELD}.inflate_to", "no space left"):
        inflated(source)
    assert list(cache.iterdir()) == []


@pytest.mark.usefixtures("cache", "quick")
def test_what_cannot_be_inflated_names_the_field(tmp_path: Path) -> None:
    with refused(f"{FIELD}.inflate_to", "only llama"):
        inflated(save_gpt2(tmp_path / "gpt2"))
    source = edit_config(save_llama(tmp_path / "llama"), dtype="float8_e4m3fn")
    with pytest.raises(ConfigError, match="float8"):
        inflated(source)


@pytest.mark.parametrize(
    ("file", "harm"),
    [
        *((".", harm) for harm in OF_FOLDER.values()),
        *(("model.safetensors", OF_FILE[name]) for name in ("a bit in the middle", "a pipe")),
        ("tokenizer.json", OF_FILE["gone"]),
    ],
)
def test_a_damaged_folder_is_made_anew(
    file: str,
    harm: Damage,
    cache: Path,
    quick: list[Path],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    source = save_llama(tmp_path / "source")
    folder = inflated(source)
    harm(folder / file)
    assert inflated(source) == folder
    assert len(quick) == 2
    assert damage(folder) is None
    assert list(cache.iterdir()) == [folder]
    [warning] = [one for one in caplog.records if one.levelno == logging.WARNING]
    assert "is made anew" in warning.getMessage()
    inflated(source)
    assert len(quick) == 2


@pytest.mark.usefixtures("cache")
def test_the_process_that_inflates_ends_with_the_one_that_waits() -> None:
    script = (
        "import sys; from modelpool.inflate import inflate\n"
        "inflate.inflate_to = lambda *_, **__: __import__('time').sleep(600)\n"
        "inflate.main()"
    )
    arguments = [sys.executable, "-c", script, "source", "out", "1", "float32"]
    with subprocess.Popen(arguments, stdin=subprocess.PIPE) as process:
        assert process.stdin is not None
        process.stdin.close()
        assert process.wait(300) == 1
