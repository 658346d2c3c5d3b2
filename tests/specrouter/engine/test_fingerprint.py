from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from modelpool import ModelPool
from modelpool.config import PoolConfig
from specrouter.engine import fingerprint
from test_support.factories import SAVERS
from tests.modelpool.compressed import needs_int8


@pytest.mark.parametrize(("family", "is_another"), [("qwen3.5", True), ("llama", False)])
def test_it_tells_who_computes_the_states_of_recurrent_layers(
    family: str, is_another: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = {"name": "m", "source": str(SAVERS[family](tmp_path)), "device": "cpu"}
    config = PoolConfig.model_validate({"target": "m", "models": [model]})
    found = set()
    for kernels in (None, object()):
        monkeypatch.setattr(fingerprint, "matrix_kernels", lambda kernels=kernels: kernels)
        found.add(fingerprint.fingerprint_of(config, ModelPool(config)))
    assert len(found) == (2 if is_another else 1)


@needs_int8
@pytest.mark.parametrize(("weights", "count"), [("int8", 3), ("auto", 1)])
def test_it_tells_how_weights_were_quantised_and_who_computes_them(
    weights: str, count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = {"name": "m", "source": str(SAVERS["llama"](tmp_path)), "weights": weights}
    config = PoolConfig.model_validate({"target": "m", "models": [{**model, "device": "cpu"}]})
    found = set()
    for number, said in ((1, "torch"), (2, "torch"), (2, "C library")):
        monkeypatch.setattr(fingerprint, "ARITHMETIC", number)
        monkeypatch.setattr(fingerprint, "layer_arithmetic", lambda _, said=said: said)
        found.add(fingerprint.fingerprint_of(config, ModelPool(config)))
    assert len(found) == count


def test_it_tells_who_computes_attention(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = {"name": "m", "source": str(SAVERS["llama"](tmp_path)), "device": "cpu"}
    config = PoolConfig.model_validate({"target": "m", "models": [model]})
    found = set()
    for said in ("torch", "C library 1", "C library 2"):
        monkeypatch.setattr(fingerprint, "attention_arithmetic", lambda said=said: said)
        found.add(fingerprint.fingerprint_of(config, ModelPool(config)))
    assert len(found) == 3


def test_it_tells_whether_texts_may_depend_on_what_is_beside_them() -> None:
    kept: Any = SimpleNamespace(bits_depend_on=None)
    moved: Any = SimpleNamespace(bits_depend_on="pack sizes")
    assert fingerprint.with_bits("fp_1", kept) == "fp_1"
    assert fingerprint.with_bits("fp_1", moved) == "fp_1_varies"
