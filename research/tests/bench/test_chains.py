"""`python -m research chains` as a whole."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from research.__main__ import main
from research.bench.session import deal_by_category, mean_spread
from specrouter.bench.figures import Spread
from specrouter.bench.prompts import BenchPrompt

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
    return main(["chains", "--config", config, *options])


def test_chains_are_tuned_and_go_by_their_names(
    small: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = tmp_path / "code.jsonl"
    prompts.write_text('{"prompt": "def f(x):"}\n')
    chain = "tiny-1m>tiny-3m"
    options = ["--rounds=1", "--new-tokens=4", "--batch", "1", "2", "--prompts", str(prompts)]
    options += ["--only", "off", "smallest", "tuned", "adaptive", "--depths", "2", "--widths", "1"]
    files = [f"--json={tmp_path / 'figures.json'}"]
    assert bench(small, *options, *files) == 0
    out, err = capsys.readouterr()
    assert "{" not in out
    assert "over smallest          over tuned" in out
    document = json.loads((tmp_path / "figures.json").read_text())
    assert document["conditions"]["prompts"] == {"code": 1}
    assert list(document["batches"]) == ["1", "2"]
    for batch in document["batches"].values():
        rows = batch["contenders"]
        speeds = {name: one["tokens_per_s"] for name, one in batch["tuning"].items()}
        assert set(speeds) == {chain, "text>tiny-3m"}
        best = max(speeds, key=lambda name: speeds[name])
        assert set(rows) == {"off", chain, best, "adaptive"}
        assert batch["aliases"] == {"smallest": chain, "tuned": best}
        assert batch["shapes"] == {name: {"depth": 2, "width": 1} for name in (chain, best)}
        assert rows["off"]["acceptance_length"] == pytest.approx(1.0)
        assert rows["off"]["over"]["off"]["median"] == pytest.approx(1.0)
        assert 0 < rows[chain]["control_share"] < 1
    assert "code" in document["batches"]["1"]["contenders"]["adaptive"]["over_by_category"]
    assert "batch 2 (2 of 2), round 1/1: off " in err


def test_recorded_outputs_are_replayed_part_by_part_in_batches_that_there_are_rows_for(
    small: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recorded = tmp_path / "mine.jsonl"
    recorded.write_text('{"prompt": "def f(x):", "output": " return [1, 2, 3]\\n"}\n')
    options = ["--workload=agent", "--rounds=1", "--only", "off", "--json=-"]
    assert bench(small, *options, "--prompts", str(recorded)) == 0
    out = capsys.readouterr().out.splitlines()
    document = json.loads(out[-1])
    assert document["conditions"]["prompts"] == {"mine": 1}
    assert document["conditions"]["by_category"]
    assert document["conditions"]["temperature"] == 0
    assert len(document["conditions"]["recorded"]["sha256"]) == 16
    assert {batch: list(one["contenders"]) for batch, one in document["batches"].items()} == {
        "1": ["off"]
    }


def test_by_category_each_batch_is_of_one_and_the_headline_is_the_mean() -> None:
    prompts = {
        name: [BenchPrompt(name, f"{name}{at}", (at,)) for at in range(count)]
        for name, count in (("a", 2), ("b", 5))
    }
    works = deal_by_category(prompts, 1, 4, new_tokens=8, temperature=0.0)
    assert [work.category for work in works] == ["a", "b"]
    assert [one.text for one in works[1].prompts] == ["b4", "b0", "b1", "b2"]
    assert [work.seeds[0] for work in works] == [10_000, 10_004]
    one, other = (Spread(median=x, low=x - 1, high=x + 2) for x in (2.0, 4.0))
    assert mean_spread([one, other]) == {"median": 3.0, "low": 2.0, "high": 5.0}
