"""Conversations of which every turn is asked with the cache and without."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from modelpool.errors import ConfigError
from specrouter.bench.turns import COLD, WARM, bench_turns, turns_table
from specrouter.cli.main import _parser
from specrouter.config import RouterConfig
from specrouter.progress import Progress


@pytest.fixture
def config(small_config: dict[str, Any], tmp_path: Path) -> Path:
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(small_config))
    return path


def turns(config: Path, options: str) -> dict[str, Any]:
    asked = _parser().parse_args(["bench", "turns", f"--config={config}", *options.split()])
    return bench_turns(asked, RouterConfig.load(config), Progress())


def test_turns_find_what_was_said_before(config: Path) -> None:
    document = turns(config, "--chats=2 --turns=3 --history=120 --said=9 --new-tokens=4")
    rows = document["turns"]
    assert [row["prompt_tokens"] for row in rows] == [103, 116, 129]
    assert rows[0]["cached_tokens"] == 0
    # All but the new words and the last token of the answer, which was not read.
    assert rows[2]["cached_tokens"] == 119
    assert all(set(row["ttft_ms"]) == {WARM, COLD} and row["ratio"] > 0 for row in rows)
    lines = turns_table(document).splitlines()
    assert len(lines) == 4 + 3
    assert "TTFT cached" in lines[3]
    assert json.loads(json.dumps(document)) == document


def test_more_history_than_the_models_read_is_refused(config: Path) -> None:
    with pytest.raises(ConfigError, match=r"^--history: turns of 5064 tokens do not fit"):
        turns(config, "--history=5000")
