"""Which quantisations of a checkpoint are read, and which are refused by name."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from modelpool.checkpoint.footprint import read_checkpoint
from modelpool.checkpoint.quantization import stored_as
from tests.modelpool.compressed import declare, scheme
from tests.modelpool.factories import save_llama
from tests.modelpool.refused import refused

FIELD = "pool.models[0]"


@pytest.mark.parametrize(
    ("quantization", "reason"),
    [
        ({"quant_method": "of-tomorrow"}, "quantised by 'of-tomorrow'"),
        (scheme({"num_bits": 4}), "weights of 4 bits"),
        (scheme({"strategy": "group", "group_size": 128}), "weights of .*per group"),
        (scheme({"type": "float"}), r"weights of 8 bits \(float"),
        (scheme({"symmetric": False}), "weights of .*asymmetric"),
        (scheme(activations={"dynamic": False}), "activations of .*static"),
        (scheme(activations={"strategy": "tensor"}), "activations of .*per tensor"),
        (scheme(format="pack-quantized"), "pack-quantized with quantised activations"),
        (scheme(config_groups={}), "no config_groups"),
        (scheme(kv_cache_scheme={"num_bits": 8}), "a quantised KV cache"),
    ],
)
def test_other_quantisations_are_refused_by_name(
    quantization: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    declare(save_llama(tmp_path, dtype="bfloat16"), quantization)
    with refused(f"{FIELD}.source", reason):
        read_checkpoint(tmp_path, field=FIELD)


def test_what_is_read_and_what_is_left_to_transformers() -> None:
    def stored(quantization: Any) -> str:
        return stored_as(SimpleNamespace(quantization_config=quantization))

    assert stored(None) == "plain"
    assert stored(scheme()) == "int8"
    assert stored(scheme(quantization_status="frozen", format=None)) == "int8"
    assert stored({"quant_method": "bitsandbytes"}) == "other"
    assert stored_as(SimpleNamespace(compression_config=scheme())) == "int8"
