"""Conversations of which every turn is asked with the cache and without."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from modelpool.errors import ConfigError
from specrouter.bench.options import TurnsOptions
from specrouter.bench.turns import COLD, WARM, bench_turns, table, write
from specrouter.progress import Progress


@pytest.fixture
def config(small_config: dict[str, Any], tmp_path: Path) -> Path:
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(small_config))
    return path


def test_turns_find_what_was_said_before(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = TurnsOptions(
        config=config, chats=2, turns=3, history=120, said=9, new_tokens=4, rows=2
    )
    document = bench_turns(options, Progress())
    rows = document["turns"]
    assert [row["prompt_tokens"] for row in rows] == [options.first, options.first + 13, 129]
    assert rows[0]["cached_tokens"] == 0
    # All but the new words and the last token of the answer, which was not read.
    assert rows[2]["cached_tokens"] == 119
    assert all(set(row["ttft_ms"]) == {WARM, COLD} and row["ratio"] > 0 for row in rows)
    assert len(table(document).splitlines()) == 4 + 3
    write(document, options)
    assert TurnsOptions(config=config, turns=3, history=20, said=9, new_tokens=4).first == 3
    assert "TTFT cached" in capsys.readouterr().out
    assert json.loads(json.dumps(document)) == document


def test_more_history_than_the_models_read_is_refused(config: Path) -> None:
    with pytest.raises(ConfigError, match=r"^--history: turns of 5064 tokens do not fit"):
        bench_turns(TurnsOptions(config=config, history=5000), Progress())
