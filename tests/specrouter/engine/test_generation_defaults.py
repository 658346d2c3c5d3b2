"""With `generation_defaults: model` a checkpoint's sampling parameters are a request's own."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from specrouter import ChainRouter, ConfigError, SamplingParams
from specrouter.http.service import Service
from test_support.families import NAMES
from tests.specrouter.engine.engines import changed
from tests.specrouter.http.client import post

RECOMMENDED = {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "min_p": 0.01}
TARGET = {"max_tokens": 8, "prompt": [5, 6, 7], "seed": 3}


def with_file(config: dict[str, Any], folder: Path, content: dict[str, Any], **engine: Any) -> Any:
    """The family's target, whose generation config has this content."""
    target = config["pool"]["models"][-1]
    shutil.copytree(target["source"].removeprefix("path:"), folder / "target")
    file = folder / "target" / "generation_config.json"
    file.write_text(json.dumps(content))
    pool = {"target": NAMES[-1], "models": [target | {"source": f"path:{folder / 'target'}"}]}
    return changed({**config, "pool": pool}, **engine)


@pytest.fixture(scope="module")
def settings(small_config: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Any:
    content = {**RECOMMENDED, "do_sample": True, "pad_token_id": 0}
    folder = tmp_path_factory.mktemp("recommends")
    return with_file(small_config, folder, content, generation_defaults="model")


@pytest.fixture(scope="module")
def router(settings: Any) -> Iterator[ChainRouter]:
    with ChainRouter.from_config(settings) as opened:
        yield opened


def sampled(router: ChainRouter, **fields: Any) -> dict[str, Any]:
    answer = post(router, {**TARGET, **fields}, "/v1/completions").json()
    used: dict[str, Any] = answer["metrics"]["sampling"]
    return used


def test_what_a_request_leaves_out_is_the_checkpoint_s(router: ChainRouter) -> None:
    whole = {**RECOMMENDED, "repetition_penalty": 1.0}
    assert router.generate([5, 6, 7])[0].metrics.sampling == whole
    assert sampled(router) == whole
    assert sampled(router, temperature=0, top_k=-1) == {**whole, "temperature": 0, "top_k": 0}
    own = router.generate([5, 6, 7], SamplingParams())[0].metrics.sampling
    assert own == {**dict.fromkeys(whole, 0), "top_p": 1.0, "repetition_penalty": 1.0}


def test_by_default_nothing_of_it_is_used(settings: Any) -> None:
    with ChainRouter.from_config(changed(settings, generation_defaults="neutral")) as router:
        neutral = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
        assert sampled(router) == {**neutral, "repetition_penalty": 1.0}
        assert router.generate([5, 6, 7])[0].metrics.sampling["temperature"] == 0
        assert Service(router).defaults == {}


@pytest.mark.parametrize(
    ("content", "temperature"),
    [({"top_p": 0.5}, 0.0), ({"do_sample": True, "top_p": 0.5, "temperature": None}, 1.0)],
)
def test_without_a_temperature_it_is_1_where_the_checkpoint_samples_and_else_0(
    small_config: dict[str, Any], tmp_path: Path, content: dict[str, Any], temperature: float
) -> None:
    settings = with_file(small_config, tmp_path, content, generation_defaults="model")
    with ChainRouter.from_config(settings) as router:
        assert Service(router).openai_defaults == {"temperature": temperature, "top_p": 0.5}
        assert router.generate([5, 6, 7])[0].metrics.sampling["temperature"] == temperature


@pytest.mark.parametrize("content", ["[]", "3", "{", "\xff"])
def test_a_file_that_is_no_object_is_one_line(
    small_config: dict[str, Any], tmp_path: Path, content: str
) -> None:
    settings = with_file(small_config, tmp_path, {}, generation_defaults="model")
    reason = "generation_config.json is no JSON object" if content in "[]3" else "cannot read"
    (tmp_path / "target" / "generation_config.json").write_text(content, encoding="latin-1")
    with pytest.raises(ConfigError) as refused:
        ChainRouter.from_config(settings)
    assert str(refused.value).startswith("pool.models[0].source: cannot read the checkpoint in ")
    assert reason in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("wrong", [{"top_p": 7}, {"temperature": "hot"}, {"top_k": [1]}])
def test_a_value_that_no_request_may_have_is_an_error_of_the_setting(
    small_config: dict[str, Any], tmp_path: Path, wrong: dict[str, Any]
) -> None:
    content = {"do_sample": True, **wrong}
    settings = with_file(small_config, tmp_path, content, generation_defaults="model")
    with pytest.raises(ConfigError, match=r"generation_config\.json") as refused:
        ChainRouter.from_config(settings)
    assert str(refused.value).startswith("engine.generation_defaults: ")
    assert f": {next(iter(wrong))}: must be" in str(refused.value)
