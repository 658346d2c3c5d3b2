"""Which quantisations of a checkpoint are read, and which are refused by name."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from modelpool.checkpoint.footprint import read_checkpoint
from modelpool.checkpoint.quantization import stored_as
from test_support.factories import save_llama
from tests.modelpool.checkpoint.packers import FORMATS
from tests.modelpool.compressed import declare, scheme
from tests.modelpool.refused import refused

FIELD = "pool.models[0]"


def variant(name: str, **changes: Any) -> dict[str, Any]:
    return {**FORMATS[name].declared, **changes}


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
        (variant("awq", version="gemv"), "AWQ weights are of version gemv, 4 bits; read are"),
        (variant("awq", version="marlin"), "AWQ weights are of version marlin"),
        (variant("awq", bits=8), "AWQ weights are of version gemm, 8 bits"),
        (variant("awq", zero_point=False), "4 bits, without zeros"),
        (variant("gptq", bits=3), "are of format 'gptq', 3 bits; read are 2, 4 and 8"),
        (variant("gptq", checkpoint_format="marlin"), "GPTQ weights are of format 'marlin'"),
        (variant("gptq", is_marlin_format=True), "format 'marlin'"),
        (variant("gptq", dynamic={"+:.*down": {"bits": 8}}), "own settings for layers"),
        (variant("packed", kv_cache_scheme={"num_bits": 8}), "a quantised KV cache"),
        (variant("packed", config_groups={}), "0 kinds of weights"),
        (variant("packed", format="marlin-24"), "format 'marlin-24'"),
        (variant("fp8", weight_block_size=[0, 128]), "quantization_config.weight_block_size is"),
        (variant("fp8", weight_block_size=[128]), r"weight_block_size is \[128\], and not two"),
        ({"quant_method": "mxfp4"}, "MXFP4, which is read of gpt-oss, not of llama"),
    ],
)
def test_other_quantisations_are_refused_by_name_before_their_weights(
    quantization: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    declare(save_llama(tmp_path, dtype="bfloat16"), quantization)
    (tmp_path / "model.safetensors").unlink()
    with refused(f"{FIELD}.source", reason):
        read_checkpoint(tmp_path, field=FIELD)


def test_what_is_read_and_what_is_left_to_transformers() -> None:
    def stored(quantization: Any) -> str:
        return stored_as(SimpleNamespace(quantization_config=quantization))

    assert stored(None) == "plain"
    assert stored(scheme()) == "int8"
    assert stored(scheme(quantization_status="frozen", format=None)) == "int8"
    assert stored({"quant_method": "bitsandbytes"}) == "other"
    assert stored(variant("gptq", dynamic={"-:.*head": {}})) == "gptq"  # layers that are left out
    assert stored_as(SimpleNamespace(compression_config=scheme())) == "int8"
