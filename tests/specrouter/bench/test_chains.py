"""`specrouter bench chains` as a whole, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from modelpool import ModelPool
from modelpool.config import PoolConfig
from modelpool.errors import ConfigError
from specrouter.bench.chains import batch_sizes, chains_table, chosen
from specrouter.cli.arguments import default_config
from specrouter.cli.main import main

TINY = str(default_config())
POOL = {
    "target": "tiny-3m",
    "models": [
        {"name": "text", "source": "ngram"},
        *({"name": name, "source": f"bundled:{name}"} for name in ("tiny-1m", "tiny-3m")),
    ],
}


@pytest.fixture
def small(tmp_path: Path) -> str:
    """A configuration of two models, the text itself and two rows."""
    file = tmp_path / "small.yaml"
    file.write_text(yaml.safe_dump({"pool": POOL, "engine": {"max_requests": 2}}))
    return str(file)


def bench(config: str, *options: str) -> int:
    return main(["bench", "chains", "--config", config, *options])


def test_short_run_writes_a_table_and_what_is_asked_for(
    small: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts, file = tmp_path / "code.jsonl", tmp_path / "figures.json"
    prompts.write_text('{"prompt": "def f(x):"}\n')
    options = ["--rounds=1", "--new-tokens=4", "--batch", "1", "2", "--prompts", str(prompts)]
    options += ["--only", "tiny-1m>tiny-3m", "adaptive"]
    assert bench(small, *options, f"--json={file}") == 0
    out, err = capsys.readouterr()
    assert "{" not in out
    document = json.loads(file.read_text())
    assert err.splitlines()[-1] == f"wrote {file}"
    assert document["conditions"]["prompts"] == {"code": 1}
    assert list(document["batches"]) == ["1", "2"]
    for batch in document["batches"].values():
        rows = batch["contenders"]
        assert set(rows) == {"off", "adaptive", "tiny-1m>tiny-3m"}
        assert rows["off"]["acceptance_length"] == pytest.approx(1.0)
        assert rows["off"]["over"]["off"]["median"] == pytest.approx(1.0)
        assert 0 < rows["tiny-1m>tiny-3m"]["control_share"] < 1
    assert "code" in document["batches"]["1"]["contenders"]["adaptive"]["over_by_category"]
    assert "batch 2 (2 of 2), round 1/1: off " in err


def test_a_batch_of_more_requests_than_there_are_rows_is_refused(
    small: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bench(small, "--batch", "1", "4") == 2
    error = capsys.readouterr().err
    assert "--batch: 4 is above engine.max_requests, which is 2" in error


@pytest.fixture(scope="module")
def tiny() -> ModelPool:
    return ModelPool(PoolConfig.model_validate(POOL))


def test_all_take_part_unless_some_are_asked_for(tiny: ModelPool) -> None:
    pair, own = ("tiny-1m", "tiny-3m"), "tests.specrouter.own_policies:FIRST"
    every = [("text", "tiny-3m"), pair, ("text", *pair)]
    assert chosen(tiny, None) == (every, ["adaptive"])
    assert chosen(tiny, ["static"]) == (every, [])
    assert chosen(tiny, ["tiny-1m>tiny-3m", own]) == ([pair], [own])


@pytest.mark.parametrize(
    "name", ["none.such:POLICY", "tests.specrouter.own_policies:SECOND", "tiny-3m", "peer", ""]
)
def test_what_is_neither_a_chain_nor_a_policy_is_refused(name: str, tiny: ModelPool) -> None:
    with pytest.raises(ConfigError, match=rf"^--only: '{name}' is none of off, adaptive, "):
        chosen(tiny, ["off", name])


def test_result_is_printed_where_its_file_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "results"
    folder.mkdir()
    document: dict[str, Any] = {"conditions": {}, "batches": {}}

    def measure(*_: object) -> dict[str, Any]:
        folder.rmdir()
        return document

    monkeypatch.setattr("specrouter.bench.chains.bench_chains", measure)
    monkeypatch.setattr("specrouter.bench.chains.chains_table", lambda _: "the table")
    file = folder / "figures.json"
    assert bench(TINY, "--json", str(file)) == 1
    out, err = capsys.readouterr()
    assert out == f"the table\n{json.dumps(document)}\n"
    assert err == f"specrouter: cannot write {file}: No such file or directory\n"


@pytest.mark.parametrize(
    ("rows", "sizes"), [(2, (1,)), (7, (1, 4)), (8, (1, 4, 8)), (16, (1, 4, 8, 16))]
)
def test_default_batches_are_those_that_the_configuration_has_rows_for(
    rows: int, sizes: tuple[int, ...]
) -> None:
    assert tuple(batch_sizes(None, rows)) == sizes


# the table, from a made-up document


def ratio(value: float) -> dict[str, float]:
    return {"median": value, "low": 0.9 * value, "high": 1.1 * value}


def row(speed: float, **more: Any) -> dict[str, Any]:
    return {
        "tokens_per_s": ratio(10 * speed),
        "requests_per_s": ratio(speed),
        "tpot_ms": ratio(20 / speed),
        "over": {"off": ratio(speed)},
        "tokens_per_s_by_category": {"code": ratio(10 * speed), "prose": ratio(10 * speed - 5)},
        "over_by_category": {"code": {"off": ratio(speed)}, "prose": {"off": ratio(speed - 0.5)}},
        "acceptance_length": None,
        "distinct_4grams": 0.9,
        **more,
    }


def batch(*chains: str) -> dict[str, Any]:
    rows = {name: row(2.0, control_share=0.125) for name in chains}
    return {"contenders": {"off": row(1.0), **rows, "adaptive": row(2.5)}}


DOCUMENT = {
    "conditions": {
        "cpu": "A processor",
        "gpu": None,
        "threads": 2,
        "dtype": "bfloat16",
        "temperature": 1.0,
        "models": {
            "small": {"parameters": 1_100_000, "is_inflated": False},
            "twin": {"parameters": 201_900_000, "is_inflated": True, "weights": "int8"},
            "big": {"parameters": 201_900_000, "is_inflated": True, "weights": "plain"},
        },
    },
    "batches": {"1": batch("a>big", "b>big"), "4": batch("b>big")},
}


def test_table_has_every_contender_of_every_batch() -> None:
    text = chains_table(DOCUMENT)
    assert "small 1.1M, twin 201.9M int8 (inflated), big 201.9M (inflated)" in text
    lines = text.splitlines()
    assert [line for line in lines if line.startswith("batch")] == ["batch 1", "batch 4"]
    adaptive = next(line for line in lines if line.startswith("adaptive"))
    assert adaptive.split()[1:6] == ["25.0", "2.50", "2.50", "2.25-2.75", "8.00"]
    pair = next(line for line in lines if line.startswith("a>big"))
    assert pair.split()[-2:] == ["90%", "12%"]
    for heading, row in (("tokens/s", ["25.0", "20.0"]), ("over off", ["2.50", "2.00"])):
        start = next(
            i for i, line in enumerate(lines) if line.startswith(f"{heading}, by category")
        )
        adaptive = next(line for line in lines[start:] if line.startswith("adaptive"))
        assert adaptive.split() == ["adaptive", *row]
