"""Times passes of one token through forwards without modules, on random models.

    python -m checks.measures.passes families [--rounds 9] [--threads 1]
    python -m checks.measures.passes mixture [--weights int8 int4] [--layers 4]

`families`: models of 16 layers with a hidden size of 512 in float32, each in turn with Llama, and
told as its milliseconds for each multiplication over Llama's. `mixture`: Qwen3-30B-A3B's shapes
with few layers, in bfloat16 and then quantised. Nothing else should run meanwhile.
"""

import argparse
import copy
import gc
import time
from collections.abc import Sequence
from statistics import median
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig, Qwen3MoeConfig

from modelpool.fast.direct_forward import direct_forward_of
from modelpool.fast.experts import can_quantise
from modelpool.fast.lean_forward import lean_forward_of
from modelpool.fast.tuning import Tuning
from modelpool.forward import Forward
from modelpool.packed_model import PackedModel
from modelpool.probe import ProbeView
from test_support.llama_models import SHAPED, shaped

LAYERS, HIDDEN = 16, 512
CONTEXT, END = 64, 88  # tokens before the first pass that is timed, and behind the last one
_SIZES = {
    "hidden_size": HIDDEN,
    "intermediate_size": 1408,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "max_position_embeddings": 2048,
}
_OTHER_WIDTHS = ("shared_intermediate_size", "moe_intermediate_size")


def family_config(name: str) -> PreTrainedConfig:
    """Lists have an entry for each layer."""
    longer = {
        key: (value * LAYERS)[:LAYERS]
        for key, value in SHAPED[name].items()
        if isinstance(value, list)
    }
    widths = {key: 1408 for key in _OTHER_WIDTHS if key in SHAPED[name]}
    return shaped(name, **_SIZES, **longer, **widths)


def packed_of(config: PreTrainedConfig, dtype: torch.dtype, kept: Any = "plain") -> PackedModel:
    factory: Any = AutoModelForCausalLM
    model = factory.from_config(copy.deepcopy(config), dtype=dtype).eval().requires_grad_(False)
    tuning = Tuning(pack_weights=kept == "plain")
    packed = PackedModel.wrap(config.model_type, model, config.vocab_size, tuning)
    if kept != "plain":
        packed.quantise_weights(weights=kept)
        direct_forward_of(packed)  # by which its shape is known
    return packed


def pass_ms(packed: PackedModel, forward: Forward) -> float:
    """Median of passes of one token behind some others."""
    view = ProbeView(packed.device, END, packed.kv_layers)
    times = []
    with torch.inference_mode():
        for start, stop in ((0, CONTEXT), *((at, at + 1) for at in range(CONTEXT, END))):
            view.begin(start, stop)
            positions = torch.arange(start, stop)
            tokens, index = positions * 7919 % packed.vocab_size, torch.tensor([stop - start - 1])
            started = time.perf_counter()
            forward(tokens, positions, view, index)
            times.append((time.perf_counter() - started) * 1000)
    return median(times[1:])


def multiplications(packed: PackedModel) -> int:
    """Of a token, by the weights of layers and head, of experts by those that it chooses."""
    modules: list[Any] = [*packed.model.modules()]
    linears = [each for each in modules if hasattr(each, "in_features")]
    chosen: int = getattr(packed.model.config, "num_experts_per_tok", 0)
    experts = [one for each in filter(can_quantise, modules) for one in each.parameters(False)]
    total: int = sum(each.in_features * each.out_features for each in linears)
    total += sum(one[0].numel() * chosen for one in experts if one.dim() == 3)
    return total


def families(rounds: int) -> None:
    llama = packed_of(shaped("llama-gelu", **_SIZES, hidden_act="silu"), torch.float32)
    plain = direct_forward_of(llama)
    assert plain is not None
    for name in sorted(SHAPED):
        packed = packed_of(family_config(name), torch.float32)
        direct = direct_forward_of(packed)
        if direct is None:
            print(f"{name:<20} no direct forward")
            continue
        pairs = [(pass_ms(packed, direct), pass_ms(llama, plain)) for _ in range(rounds)]
        work = multiplications(packed) / multiplications(llama)
        ratio = median(own / other for own, other in pairs) / work
        ms = median(own for own, _ in pairs)
        print(
            f"{name:<20}{ms:8.2f} ms  {ratio:5.2f} of Llama's for each multiplication", flush=True
        )


def mixture(weights: Sequence[str], layers: int, rounds: int) -> None:
    kind: Any = Qwen3MoeConfig
    config = kind(
        vocab_size=151936,
        hidden_size=2048,
        intermediate_size=6144,
        moe_intermediate_size=768,
        num_experts=128,
        num_experts_per_tok=8,
        num_hidden_layers=layers,
        num_attention_heads=32,
        num_key_value_heads=4,
        head_dim=128,
    )
    base = None
    for kept in ("plain", *weights):
        packed = packed_of(config, torch.bfloat16, kept)
        forward = (direct_forward_of if kept == "plain" else lean_forward_of)(packed)
        assert forward is not None
        ms = median(pass_ms(packed, forward) for _ in range(rounds))
        base = base or ms
        print(f"{kept:<8}{ms:8.2f} ms  {base / ms:5.2f} times bfloat16's speed", flush=True)
        del packed, forward
        gc.collect()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("what", choices=("families", "mixture"))
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--weights", nargs="+", default=["int8"], choices=("int8", "int4"))
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    torch.manual_seed(0)
    if given.what == "families":
        families(given.rounds)
    else:
        mixture(given.weights, given.layers, given.rounds)


if __name__ == "__main__":
    main()
