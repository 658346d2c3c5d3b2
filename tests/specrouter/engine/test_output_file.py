"""Earlier outputs are there again after a restart; a file that is of no use costs no more."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

from modelpool.errors import ConfigError
from specrouter import ChainRouter
from specrouter.engine.output_file import FIELD
from tests.specrouter.engine.engines import changed
from tests.specrouter.engine.test_suffix import NEW, QUOTING, output_of


def accepted(settings: dict[str, Any], tenant: str | None = None) -> int:
    """Tokens of a request to a service that has just started."""
    with ChainRouter.from_config(settings) as router:
        return output_of(router, QUOTING, tenant=tenant).metrics.accepted_tokens


def test_a_service_that_starts_again_quotes_what_it_knew(
    small_config: dict[str, Any], tmp_path: Path
) -> None:
    file = str(tmp_path / "outputs.json")
    settings = changed(small_config, "suffix", output_store_file=file)
    first = accepted(settings)
    assert accepted(settings, "another tenant") == first
    assert accepted(settings) > NEW * 0.8


def test_a_file_of_something_else_costs_a_warning(
    small_config: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "outputs.json"
    file.write_text("not JSON")
    with caplog.at_level(logging.WARNING):
        accepted(changed(small_config, "suffix", output_store_file=str(file)))
    assert any(FIELD in message and str(file) in message for message in caplog.messages)


def test_a_file_that_could_not_be_used_is_refused(
    small_config: dict[str, Any], tmp_path: Path
) -> None:
    file, elsewhere = (str(tmp_path / name) for name in ("outputs.json", "missing/outputs.json"))
    quoting = changed(small_config, "suffix", output_store_file=file)
    for settings, reason in (
        (changed(quoting, output_store_file=elsewhere), "there is no folder"),
        ({**quoting, "cluster": {"replicas": [{"name": "a", "count": 2}]}}, "each replica"),
        (changed(small_config, output_store_file=file), "no model of the pool has source: suffix"),
    ):
        with pytest.raises(ConfigError, match=f"{FIELD}: {reason}"):
            ChainRouter.from_config(settings)
