"""A model and its drafters as arguments become the configuration that a file would hold."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from modelpool.checkpoint.bundled import bundled_root
from modelpool.errors import ConfigError
from specrouter.cli.main import _parser, main
from specrouter.cli.target import read_asked
from specrouter.config import RouterConfig
from specrouter.target import AskedTarget


def asked(*argv: str) -> AskedTarget:
    return read_asked(_parser().parse_args(["serve", *argv]))


def pool(*argv: str) -> list[tuple[str, str]]:
    """Name and source of each model; the target is the first."""
    config = asked(*argv).config
    assert config.pool.models[0].name == config.pool.target
    return [(model.name, model.source) for model in config.pool.models]


TEXT = ("ngram", "ngram")  # which is added


@pytest.fixture
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two saved checkpoints, in the working directory."""
    for name, source in {"big": "tiny-8m", "small": "tiny-1m"}.items():
        shutil.copytree(bundled_root() / source, tmp_path / name)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_folders_are_served_under_their_names(folders: Path) -> None:
    small = ("small", "path:small")
    assert pool("big", "--draft", "small") == [("big", "path:big"), small, TEXT]
    assert pool(str(folders / "big"), "--draft", "./small") == [
        ("big", f"path:{folders}/big"),
        ("small", "path:./small"),
        TEXT,
    ]
    assert [one for one, _ in pool("tiny-8m", "--draft", "suffix")] == ["tiny-8m", "suffix"]
    (folders / "my model, v2").symlink_to(folders / "big")
    assert pool("./my model, v2")[0] == ("big", "path:./my model, v2")


def test_repositories_of_the_hub_keep_their_names() -> None:
    models = pool("Qwen/Qwen2.5-7B-Instruct", "--draft", "Qwen/Qwen2.5-0.5B-Instruct", "ngram")
    assert models == [
        ("Qwen/Qwen2.5-7B-Instruct", "hub:Qwen/Qwen2.5-7B-Instruct"),
        ("Qwen/Qwen2.5-0.5B-Instruct", "hub:Qwen/Qwen2.5-0.5B-Instruct"),
        ("ngram", "ngram"),
    ]
    assert pool("org/big-GGUF:Q4_K_M")[0] == ("org/big-GGUF:Q4_K_M", "hub:org/big-GGUF:Q4_K_M")


def test_a_folder_comes_before_the_hub_s_repository_of_its_name(folders: Path) -> None:
    (folders / "org").mkdir()
    (folders / "big").rename(folders / "org" / "big")
    assert pool("org/big")[0] == ("big", "path:org/big")


def test_without_drafters_the_text_itself_drafts() -> None:
    assert pool("tiny-8m") == [("tiny-8m", "bundled:tiny-8m"), ("ngram", "ngram")]


def test_the_target_itself_in_int8_is_a_drafter(folders: Path) -> None:
    twin = ("big-int8", "quantised:big")
    assert pool("./big", "--draft", "quantised", "small")[1:3] == [twin, ("small", "path:small")]
    assert pool("./big", "--draft", "quantised:big")[1:] == [twin, TEXT]
    with pytest.raises(ConfigError, match="is not the target 'big'") as caught:
        asked("./big", "--draft", "small", "quantised:small")
    assert caught.value.field == "--draft quantised:small"


def test_models_of_one_name_get_others() -> None:
    names = [name for name, _ in pool("a/model", "--draft", "path:/b/a/model", "path:/c/model")]
    assert names == ["a/model", "model", "model-2", "ngram"]


def test_a_scenario_may_be_given_by_its_name_or_its_file(tmp_path: Path) -> None:
    assert asked("tiny-ngram").config == RouterConfig.load("tiny-ngram")
    assert asked().config == RouterConfig.load("tiny")
    file = tmp_path / "my.yaml"
    file.write_text("pool: {target: t, models: [{name: t, source: 'bundled:tiny-1m'}]}\n")
    for given in ([str(file)], ["--config", str(file)]):
        assert asked(*given).config.pool.target == "t"


def test_settings_have_flags_of_their_own_or_set() -> None:
    config = asked(
        "tiny", "--max-model-len", "512", "--max-requests", "3", "--api-key", "secret",
        "--port", "0", "--fresh-times",
        "--set", "engine.prefill_chunk=64",
        "--set", "server.cors_origins=[https://a.example, https://b.example]",
        "--set", "slo_classes.fast.tpot_ms=50",
        "--set", "pool.models[0].pinned=true",
    ).config  # fmt: skip
    engine, server = config.engine, config.server
    assert (engine.max_model_len, engine.max_requests, engine.prefill_chunk) == (512, 3, 64)
    assert engine.fresh_times
    assert (server.api_keys, server.port) == (("secret",), 0)
    assert server.cors_origins == ("https://a.example", "https://b.example")
    assert config.slo_classes["fast"].tpot_ms == 50
    assert config.pool.models[0].pinned


@pytest.mark.parametrize(
    ("argv", "argument", "reason"),
    [
        (["nothing-here"], "TARGET", "is no folder, no ORG/NAME"),
        (["tiny-8m", "--draft", "nothing"], "--draft nothing", "bundled are the scenarios"),
        (["tiny", "--draft", "tiny-1m"], "--draft", "goes with a model"),
        (["--draft", "tiny-1m"], "--draft", "goes with a model"),
        (["missing.yaml"], "TARGET", "cannot read missing.yaml"),
        (["--config", "missing.yaml"], "--config", "cannot read missing.yaml"),
        (["tiny", "--max-requests", "0"], "--max-requests", "greater than or equal to 1"),
        (["tiny", "--port", "70000"], "--port", "less than or equal to 65535"),
        (["tiny", "--api-key", "two words"], "--api-key", "printable ASCII"),
        (["tiny", "--set", "engine"], "--set", "KEY=VALUE"),
        (["tiny", "--set", "engine.rows=3"], "--set engine.rows", "unknown key"),
        (["tiny", "--set", "engine.max_requests=many"], "--set engine.max_requests", "integer"),
        (["tiny", "--set", "engine.max_requests=[1"], "--set engine.max_requests", "not YAML"),
        (["tiny", "--set", "engine.max_requests="], "--set engine.max_requests", "is empty"),
        (["tiny", "--set", "pool.models[9].dtype=auto"], "--set pool.models[9].dtype", "no [9]"),
        (["tiny", "--set", "pool.models[0]=1"], "--set pool.models[0]", "no key of a section"),
        (["tiny-8m", "--draft", "ngram", "ngram"], "--draft ngram", "would draft the same"),
        (["ngram"], "TARGET", "cannot verify"),
    ],
)  # fmt: skip
def test_an_error_names_the_argument(argv: list[str], argument: str, reason: str) -> None:
    with pytest.raises(ConfigError) as refused:
        asked(*argv)
    assert refused.value.field == argument
    assert reason in refused.value.reason


def test_an_error_of_a_model_s_files_names_the_argument(
    folders: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["check", "big", "--draft", "./none"]) == 2
    assert capsys.readouterr().err.startswith("specrouter: --draft ./none: no directory ")
    (folders / "big" / "config.json").unlink()
    assert main(["check", "big", "--draft", "small"]) == 2
    assert capsys.readouterr().err.startswith("specrouter: TARGET: ")


def test_check_reads_what_serve_is_given(folders: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "big", "--draft", "small", "--max-requests", "2"]) == 0
    assert capsys.readouterr().out.startswith("big serves up to 2 requests ")
