"""Earlier outputs are there again after a restart; a file that is of no use costs no more."""

from __future__ import annotations

import copy
import logging
from pathlib import Path
from typing import Any

import pytest

from checks.exact.models import NAMES
from modelpool.errors import ConfigError
from specrouter import ChainRouter, RouterConfig, SamplingParams, Speculation
from specrouter.engine.output_file import FIELD

PROMPT = [17, 230, 41, 5, 88, 131]
NEW = 40


def settings_of(small_config: dict[str, Any], file: Path) -> dict[str, Any]:
    settings = copy.deepcopy(small_config)
    settings["pool"]["models"].append({"name": "suffix", "source": "suffix"})
    settings["engine"]["output_store_file"] = str(file)
    return settings


def accepted(settings: dict[str, Any], tenant: str | None = None) -> int:
    """Tokens of a request to a service that has just started."""
    params = SamplingParams(NEW, 1.0, seed=3, ignore_eos=True, cache_salt=tenant)
    speculation = Speculation(("suffix", NAMES[-1]), depth=20)
    with ChainRouter.from_config(settings) as router:
        [output] = router.generate([PROMPT], params, speculation)
    return output.metrics.accepted_tokens


def test_a_service_that_starts_again_quotes_what_it_knew(
    small_config: dict[str, Any], tmp_path: Path
) -> None:
    settings = settings_of(small_config, tmp_path / "outputs.json")
    first = accepted(settings)
    assert accepted(settings, "another tenant") == first
    assert accepted(settings) > NEW * 0.8


def test_a_file_of_something_else_costs_a_warning(
    small_config: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "outputs.json"
    file.write_text("not JSON")
    with caplog.at_level(logging.WARNING):
        accepted(settings_of(small_config, file))
    assert any(FIELD in message and str(file) in message for message in caplog.messages)


def test_a_file_without_a_folder_is_refused(small_config: dict[str, Any], tmp_path: Path) -> None:
    settings = settings_of(small_config, tmp_path / "missing" / "outputs.json")
    with pytest.raises(ConfigError, match=f"{FIELD}: there is no folder"):
        ChainRouter.from_config(settings)


def test_replicas_have_no_common_file(small_config: dict[str, Any], tmp_path: Path) -> None:
    settings = settings_of(small_config, tmp_path / "outputs.json")
    with pytest.raises(ConfigError, match=f"{FIELD}: each replica"):
        RouterConfig.load({**settings, "cluster": {"replicas": [{"name": "a"}, {"name": "b"}]}})


def test_a_file_that_nobody_would_quote_is_refused(
    small_config: dict[str, Any], tmp_path: Path
) -> None:
    settings = settings_of(small_config, tmp_path / "outputs.json")
    settings["pool"]["models"].pop()
    with pytest.raises(ConfigError, match=f"{FIELD}: no model of the pool has source: suffix"):
        RouterConfig.load(settings)
