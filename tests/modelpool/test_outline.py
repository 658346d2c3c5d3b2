"""What a model keeps, and why it cannot be served, is known before its weights are."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    BloomConfig,
    CodeGenConfig,
    DeepseekV2Config,
    DeepseekV3Config,
    DeepseekV32Config,
    DiffLlamaConfig,
    DogeConfig,
    Emu3Config,
    FalconConfig,
    FalconMambaConfig,
    Gemma3nTextConfig,
    Gemma4TextConfig,
    GitConfig,
    Glm4MoeLiteConfig,
    GPT2Config,
    GPTBigCodeConfig,
    GPTJConfig,
    GPTNeoConfig,
    GptOssConfig,
    JambaConfig,
    Llama4TextConfig,
    LlamaConfig,
    Mamba2Config,
    MiMoV2FlashConfig,
    MiniCPM3Config,
    MllamaConfig,
    MptConfig,
    PreTrainedConfig,
    RecurrentGemmaConfig,
    RobertaConfig,
    XGLMConfig,
)

from modelpool import outline
from modelpool.checkpoint.footprint import read_checkpoint
from modelpool.errors import UnsupportedModelError
from modelpool.mixers import registry
from modelpool.mixers.registry import Mixer, name_of, register_mixer
from modelpool.outline import UnservedModel, outline_of
from modelpool.packed_model import PackedModel
from modelpool.pool import ModelPool
from statemgr import KVStore, ModelState
from test_support.factories import (
    HYBRIDS,
    SAVERS,
    VOCAB_SIZE,
    edit_config,
    make_tokenizer,
    save_llama,
)
from test_support.toy_hybrid import AverageOfPacks, ToyHybridConfig
from tests.modelpool.refused import refused

# What the reason must name: the layer, where it is one that cannot be served.
REFUSED: dict[str, tuple[Callable[[], PreTrainedConfig], str]] = {
    "jamba": (JambaConfig, ""),
    "mamba2": (Mamba2Config, ""),
    "bloom": (BloomConfig, "does not dispatch its attention"),
    "mpt": (MptConfig, "does not dispatch its attention"),
    "falcon": (FalconConfig, "does not dispatch its attention"),
    "gptj": (GPTJConfig, "does not dispatch its attention"),
    "gpt-neo": (GPTNeoConfig, "does not dispatch its attention"),
    "codegen": (CodeGenConfig, "does not dispatch its attention"),
    "xglm": (XGLMConfig, "does not dispatch its attention"),
    "falcon-mamba": (FalconMambaConfig, "layer 0 is of type linear_attention"),
    "recurrent-gemma": (RecurrentGemmaConfig, "layer 0 is of type linear_attention"),
    "deepseek-v3.2": (DeepseekV32Config, "layer 0 is of type indexed_attention"),
    "doge": (DogeConfig, "layer 0: its attention needs a mask of its own"),
    "diffllama": (DiffLlamaConfig, "layer 0 attends more than once in a forward"),
    "roberta": (
        lambda: RobertaConfig(is_decoder=True),
        "its positions are counted from the padding token's id",
    ),
    "git": (GitConfig, "does not dispatch its attention"),
    "mllama": (MllamaConfig, "a composite, of which MllamaForCausalLM is not served alone"),
    "emu3": (Emu3Config, "a composite, of which Emu3ForCausalLM is not served alone"),
}

_SMALL: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
}
_LATENT: dict[str, Any] = {
    **_SMALL,
    "num_key_value_heads": 4,
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 24,
}
_EXPERTS: dict[str, Any] = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
}
_GEMMA: dict[str, Any] = {
    **_SMALL,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "sliding_window": 32,
    "hidden_size_per_layer_input": 16,
    "global_head_dim": 32,
    "vocab_size_per_layer_input": 320,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
}
KEPT: dict[str, Callable[[], PreTrainedConfig]] = {
    "deepseek-v3": lambda: DeepseekV3Config(
        **_LATENT | {"v_head_dim": 16}, **_EXPERTS, first_k_dense_replace=1
    ),
    "mimo-v2-flash": lambda: MiMoV2FlashConfig(
        **_SMALL,
        num_key_value_heads=1,
        head_dim=24,
        v_head_dim=16,
        layer_types=["full_attention", "sliding_attention"] * 2,
        n_routed_experts=4,
        num_experts_per_tok=2,
    ),
    "glm-4.7-flash": lambda: Glm4MoeLiteConfig(**_LATENT, **_EXPERTS),
    "deepseek-v2": lambda: DeepseekV2Config(**_LATENT, **_EXPERTS, first_k_dense_replace=1),
    "minicpm3": lambda: MiniCPM3Config(**_LATENT),
    "gemma4": lambda: Gemma4TextConfig(**_GEMMA, num_kv_shared_layers=0),
    "gemma4-shared": lambda: Gemma4TextConfig(**_GEMMA, num_kv_shared_layers=2),
    "gemma3n": lambda: Gemma3nTextConfig(
        **{key: one for key, one in _GEMMA.items() if key != "global_head_dim"}
        | {"intermediate_size": [96] * 4},
        num_kv_shared_layers=2,
        activation_sparsity_pattern=[0.0] * 4,
    ),
    "starcoder": lambda: GPTBigCodeConfig(
        vocab_size=320, n_embd=64, n_layer=4, n_head=4, n_positions=256, multi_query=True
    ),
    "gpt-oss": lambda: GptOssConfig(
        **_SMALL, num_key_value_heads=2, head_dim=16, num_local_experts=4, num_experts_per_tok=2
    ),
    "llama": lambda: LlamaConfig(**_SMALL, num_key_value_heads=2),
    "gpt2-padded": lambda: GPT2Config(
        vocab_size=320, n_embd=64, n_layer=2, n_head=4, n_positions=256, pad_token_id=0
    ),
}


def described(config: PreTrainedConfig, directory: Path) -> Path:
    """A checkpoint whose weights nobody may open."""
    config.save_pretrained(directory)
    make_tokenizer(directory)
    with open(directory / "model.safetensors", "wb") as file:
        file.write(b"not to be opened")
    return directory


@pytest.fixture
def closed_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    ordinary = Path.open

    def opened(path: Path, *args: Any, **kwargs: Any) -> Any:
        assert path.suffix != ".safetensors", "weights were opened"
        return ordinary(path, *args, **kwargs)

    def loaded(*_: Any, **__: Any) -> None:
        raise AssertionError("weights were read")

    monkeypatch.setattr(Path, "open", opened)
    monkeypatch.setattr("safetensors.safe_open", loaded)
    monkeypatch.setattr("transformers.modeling_utils.safe_open", loaded)


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({}, "layer 0 is of type chunked_attention"),
        (
            {"layer_types": ["full_attention"] * 4, "num_hidden_layers": 4},
            "layer 3: what it attends with depends on a token's place in the pack",
        ),
    ],
)
def test_chunks_and_places_are_refused(settings: dict[str, Any], reason: str) -> None:
    config: Any = Llama4TextConfig(**settings)
    config.model_type = "like_llama4"  # not known to be ordinary within its first chunk
    with pytest.raises(UnservedModel, match=reason):
        outline_of(config)


@pytest.mark.slow
@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.usefixtures("closed_weights")
def test_a_refusal_names_the_layer_before_weights_are_opened(name: str, tmp_path: Path) -> None:
    make, reason = REFUSED[name]
    path = described(make(), tmp_path)
    with refused("pool.models[0].source", re.escape(reason), UnsupportedModelError):
        ModelPool.from_config({"target": "it", "models": [{"name": "it", "source": str(path)}]})


@pytest.mark.parametrize("name", KEPT)
def test_memory_is_counted_as_it_is_allocated(name: str, tmp_path: Path) -> None:
    factory: Any = AutoModelForCausalLM
    model = factory.from_config(KEPT[name](), dtype=torch.float32)
    model.save_pretrained(tmp_path)
    facts = read_checkpoint(tmp_path, field="pool.models[0]")
    packed = PackedModel.wrap(name, factory.from_pretrained(tmp_path), 320)
    store = KVStore(packed.kv_layers, slots=128)
    assert facts.kv_bytes_per_token * 128 == store.nbytes == packed.kv_bytes_per_token * 128
    held = {one.data_ptr(): one.numel() for one in model.state_dict().values()}
    assert facts.parameter_count == sum(held.values())
    if "kv_lora_rank" in model.config.to_dict():  # latents and rotated keys alone
        assert facts.kv_bytes_per_token == 4 * (16 + 8) * 4
    found = outline_of(AutoConfig.from_pretrained(tmp_path))
    kept = (found.kv_layers.values(), packed.kv_layers.values())
    mine, theirs = (
        [(one.kv_heads, one.head_dim, one.value_dim, one.source) for one in layers]
        for layers in kept
    )
    assert mine == theirs
    assert found.parameter_count == packed.parameter_count


@pytest.mark.parametrize("name", ["llama", *KEPT])
def test_a_later_start_tries_no_model_and_finds_the_same(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPECROUTER_CACHE", str(tmp_path))
    config = KEPT[name]() if name in KEPT else LlamaConfig(**_SMALL | {"num_hidden_layers": 12})
    outline._outline_of.cache_clear()
    first = outline_of(config)
    outline._outline_of.cache_clear()
    monkeypatch.setattr(outline, "_found", None)
    assert outline_of(config) == first


def test_a_repositorys_own_class_is_tried_at_every_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPECROUTER_CACHE", str(tmp_path))
    config = LlamaConfig(**_SMALL | {"auto_map": {"AutoModelForCausalLM": "modeling_x.Model"}})
    outline._outline_of.cache_clear()
    outline_of(config)
    assert not (tmp_path / "outlines").exists()


@pytest.mark.parametrize("dtype", ["bfloat16", "float64"])
@pytest.mark.parametrize("name", HYBRIDS)
def test_recurrent_states_are_counted_by_row_and_keys_and_values_of_attention_alone(
    name: str, dtype: str, tmp_path: Path
) -> None:
    path = SAVERS[name](tmp_path, layers=1, dtype=dtype)
    facts = read_checkpoint(path, field="pool.models[0]")
    factory: Any = AutoModelForCausalLM
    packed = PackedModel.wrap("it", factory.from_pretrained(path, dtype="auto"), VOCAB_SIZE)
    kept = list(packed.kv_layers), sorted({layer for layer, _ in packed.recurrent_layers})
    assert kept == (([0], [0]) if name == "falcon-h1" else ([1], [0, 2]))
    state = ModelState(packed.kv_layers, 3, 128, recurrent=packed.recurrent_layers)
    assert facts.state_bytes == state.recurrent.row_bytes > 0
    assert facts.weight_bytes == sum(one.nbytes for one in packed.model.parameters())
    footprint = facts.footprint("it", "pool.models[0]", "auto", states=3)
    assert footprint.row_bytes(3 * 128) == state.nbytes
    assert footprint.total_bytes(0) == facts.weight_bytes + state.recurrent.nbytes


def test_a_recurrent_layer_that_no_registered_module_computes_is_refused() -> None:
    config: Any = ToyHybridConfig(num_hidden_layers=2)
    config.layer_types = ["conv", "full_attention"]
    with pytest.raises(UnservedModel, match="layer 0 is of type conv"):
        outline_of(config)
    module = name_of(torch.nn.Bilinear)
    register_mixer(Mixer(config.model_type, "conv", module, AverageOfPacks()))
    try:
        with pytest.raises(UnservedModel, match="layer 0: its conv is computed by no module"):
            outline_of(config)
    finally:
        del registry._MIXERS[module]


def test_a_mixer_that_applies_something_else_than_silu_is_refused(tmp_path: Path) -> None:
    edit_config(SAVERS["granite-4-h"](tmp_path, layers=1), hidden_act="gelu")
    with pytest.raises(UnservedModel, match="MambaLayer applies gelu; only silu is known"):
        outline_of(AutoConfig.from_pretrained(tmp_path))


# Drafters


def test_a_drafter_that_cannot_be_served_is_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save_llama(tmp_path / "large", layers=4)
    save_llama(tmp_path / "small", layers=1)
    described(BloomConfig(vocab_size=320), tmp_path / "odd")
    names = ("odd", "small", "large")
    models = [{"name": name, "source": str(tmp_path / name)} for name in names]
    pool = ModelPool.from_config({"target": "large", "models": models})
    assert pool.names == ("small", "large")
    assert "does not dispatch its attention" in pool.left_out["odd"]
    assert "'odd' is left out: pool.models[0].source: BloomFor" in caplog.text


def test_the_only_drafter_is_not_left_out_silently(tmp_path: Path) -> None:
    save_llama(tmp_path / "large", layers=4)
    described(BloomConfig(vocab_size=320), tmp_path / "odd")
    models = [{"name": name, "source": str(tmp_path / name)} for name in ("odd", "large")]
    with pytest.raises(UnsupportedModelError, match="dispatch"):
        ModelPool.from_config({"target": "large", "models": models})
    models.append({"name": "ngram", "source": "ngram"})
    assert ModelPool.from_config({"target": "large", "models": models}).names == ("ngram", "large")
