"""What a GGUF file says beside its weights: configuration, tokenizer, template."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig, AutoTokenizer

from modelpool.checkpoint.bundled import bundled_root
from modelpool.gguf.rotation import frequency_factors
from specrouter import ChainRouter, RequestError, SamplingParams, Speculation
from specrouter.cli.main import main
from test_support.factories import edit_config, pool_of
from tests.modelpool.gguf.files import save, tokens_of, write
from tests.modelpool.refused import refused

FIELD = "pool.models[0].source"
BUNDLED = bundled_root() / "tiny-1m"
TEXT = "The 12 quick  brown foxes, don't they\n\n jump over 3456 dogs?"


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundled model as a file."""
    file = tmp_path_factory.mktemp("exported") / "tiny.gguf"
    return write("llama", BUNDLED, file, "Q8_0", pre="smollm")


def test_an_exported_checkpoint_comes_back(exported: Path) -> None:
    pool = pool_of(exported)
    assert pool.path("m").name.startswith("tiny-")
    assert pool.eos_token_ids == {0}
    first = AutoTokenizer.from_pretrained(str(BUNDLED))
    assert pool.tokenizer.get_vocab() == first.get_vocab()
    assert pool.tokenizer.encode(TEXT) == first.encode(TEXT)
    assert pool.tokenizer.decode(first.encode(TEXT)) == TEXT
    found, wanted = (AutoConfig.from_pretrained(str(one)) for one in (pool.path("m"), BUNDLED))
    for name in ("hidden_size", "num_hidden_layers", "rms_norm_eps", "rope_parameters",
                 "tie_word_embeddings", "max_position_embeddings", "vocab_size"):  # fmt: skip
        assert getattr(found, name) == pytest.approx(getattr(wanted, name)), name


@pytest.mark.parametrize(
    ("family", "pre"), [("qwen2", "qwen2"), ("llama", "gpt-2"), ("llama", None)]
)
def test_a_tokenizer_is_the_one_that_transformers_has_for_the_model(
    family: str, pre: str | None, tmp_path: Path
) -> None:
    save(family, tmp_path / "m")
    pool = pool_of(write(family, tmp_path / "m", tmp_path / "m.gguf", pre=pre))
    wanted = AutoTokenizer.from_pretrained(str(pool.path("m")))
    assert pool.tokenizer.backend_tokenizer.to_str() == wanted.backend_tokenizer.to_str()
    assert pool.tokenizer.all_special_ids == wanted.all_special_ids
    assert pool.tokenizer.chat_template == wanted.chat_template
    ids = wanted.encode(TEXT)
    assert pool.tokenizer.encode(TEXT) == ids
    assert pool.tokenizer.decode(ids) == wanted.decode(ids)
    if family == "qwen2":  # it normalises texts, which no fact of a file says
        assert pool.tokenizer.backend_tokenizer.normalizer.normalize_str("e\u0301") == "\u00e9"


@pytest.mark.parametrize("named", [False, True])
def test_texts_end_with_tokens_of_known_spelling_and_with_those_that_are_named(
    named: bool, tmp_path: Path
) -> None:
    save("llama", tmp_path / "m")
    config = json.loads((tmp_path / "m" / "config.json").read_text())
    tokens = tokens_of(tmp_path / "m", config["vocab_size"])
    tokens[300], tokens[301] = "<|im_end|>", "<|eom_id|>"
    facts: dict[str, Any] = {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.merges": ["t h"]}
    if named:
        facts |= {"tokenizer.ggml.eot_token_id": 7, "tokenizer.ggml.eom_token_id": 8}
    file = write("llama", tmp_path / "m", tmp_path / "m.gguf", facts=facts)
    assert pool_of(file).eos_token_ids == {0, 300, 301} | ({7, 8} if named else set())


def test_tokens_that_the_file_calls_unused_are_never_chosen(tmp_path: Path) -> None:
    save("llama", tmp_path / "m")
    size = json.loads((tmp_path / "m" / "config.json").read_text())["vocab_size"]
    kinds = [1] * size
    kinds[0], kinds[5], kinds[7], kinds[-3:] = 3, 5, 5, [5] * 3
    facts: dict[str, Any] = {"tokenizer.ggml.token_type": kinds, "tokenizer.ggml.eot_token_id": 7}
    facts["tokenizer.ggml.merges"] = ["t h"]
    file = write("llama", tmp_path / "m", tmp_path / "m.gguf", facts=facts)
    pool = pool_of(file)
    assert (pool.vocab_size, pool.unused_ids) == (size - 3, (5,))  # 7 ends texts
    settings = {"pool": {"target": "m", "models": [{"name": "m", "source": str(file)}]}}
    with ChainRouter.from_config(settings) as router:
        bias = {5: 100, 8: 50}
        params = SamplingParams(max_new_tokens=4, logit_bias=bias, ignore_eos=True)
        assert router.generate([[9]], params)[0].token_ids == [8] * 4
        with pytest.raises(RequestError, match="must be from 0"):
            router.generate([[size - 1]])


@pytest.mark.parametrize(
    ("spelled", "ends"),
    [
        (("<|end|>", "<|return|>"), 2),
        (("<|end|>", "<|return|>", "<|call|>"), 2),
        (("</s>", "<|tool_response>"), 1),
    ],
)
def test_what_looks_like_an_end_may_be_an_ordinary_token(
    spelled: tuple[str, ...], ends: int, tmp_path: Path
) -> None:
    """gpt-oss ends parts of an answer with `<|end|>`."""
    save("llama", tmp_path / "m")
    tokens = tokens_of(tmp_path / "m", 320)
    tokens[300 : 300 + len(spelled)] = spelled
    facts = {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.merges": ["t h"]}
    file = write("llama", tmp_path / "m", tmp_path / "m.gguf", facts=facts)
    wanted = set(range(301, 300 + len(spelled))) | ({300} if ends == len(spelled) else set())
    assert pool_of(file).eos_token_ids == {0} | wanted


@pytest.mark.parametrize(
    ("pre", "pieces"),
    [
        ("refact", ["a", "1", "2", "!", "b\u00e9"]),
        ("glm4", ["a", "12", "!b\u00e9"]),
        ("deepseek-coder", ["a", "1", "2", "!", "b\u00e9"]),
        ("deepseek-v3", ["a", "12", "!b", "\u00e9"]),
        ("deepseek-llm", ["a", "12", "!", "b", "\u00e9"]),
    ],
)
def test_texts_are_split_as_the_file_s_name_for_it_says(
    pre: str, pieces: list[str], tmp_path: Path
) -> None:
    save("llama", tmp_path / "m")
    file = write("llama", tmp_path / "m", tmp_path / "m.gguf", pre=pre)
    splitter = pool_of(file).tokenizer.backend_tokenizer.pre_tokenizer
    text = "a12!b\u00e9"
    found = [text[slice(*span)] for _, span in splitter.pre_tokenize_str(text)]
    assert found == pieces


def test_a_vocabulary_of_gemma_4_has_merges_of_whole_texts(tmp_path: Path) -> None:
    save("llama", tmp_path / "m")
    special = ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>"]
    tokens = [*special, "\u2581", *"the\n", "th", "\u2581th", "\u2581the"]
    tokens += [f"<0x{byte:02X}>" for byte in range(256)]
    tokens += [f"[PAD{one}]" for one in range(320 - len(tokens))]
    facts = {
        "tokenizer.ggml.model": "gemma4",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": [0.0] * 320,
        "tokenizer.ggml.token_type": [3] * 5 + [1] * 315,
        "tokenizer.ggml.merges": ["t h", "\u2581 th", "\u2581th e"],
        "tokenizer.ggml.bos_token_id": 2,
        "tokenizer.ggml.add_bos_token": True,
    }
    tokenizer = pool_of(write("llama", tmp_path / "m", tmp_path / "m.gguf", facts=facts)).tokenizer
    ids = tokenizer.encode("th the\n")
    assert tokenizer.convert_ids_to_tokens(ids) == ["<bos>", "th", "\u2581the", "\n"]
    assert tokenizer.decode(ids, skip_special_tokens=True) == "th the\n"


def test_gemma_3_without_a_window_attends_to_all_and_may_cap_its_logits(tmp_path: Path) -> None:
    save("gemma3", tmp_path / "m")
    whole = {"gemma3.attention.sliding_window": 0, "gemma3.final_logit_softcapping": 30.0}
    file = write("gemma3", tmp_path / "m", tmp_path / "m.gguf", facts=whole)
    config = AutoConfig.from_pretrained(str(pool_of(file).path("m")))
    assert set(config.layer_types) == {"full_attention"}
    assert config.final_logit_softcapping == 30.0


def test_a_sentencepiece_vocabulary_is_read(tmp_path: Path) -> None:
    save("llama", tmp_path / "m")
    file = write("llama", tmp_path / "m", tmp_path / "m.gguf", pre=None)
    tokenizer = pool_of(file).tokenizer
    ids = tokenizer.encode("the and Z")
    pieces = tokenizer.convert_ids_to_tokens(ids)
    assert pieces == ["<s>", "\u2581the", "\u2581and", "\u2581", "<0x5A>"]
    assert tokenizer.decode(ids, skip_special_tokens=True) == "the and Z"


def test_a_sentencepiece_vocabulary_may_be_without_a_space_in_front(tmp_path: Path) -> None:
    save("llama", tmp_path / "m")
    facts = {"tokenizer.ggml.add_space_prefix": False}
    file = write("llama", tmp_path / "m", tmp_path / "m.gguf", facts=facts, pre=None)
    pool = pool_of(file)
    for one in (pool.tokenizer, AutoTokenizer.from_pretrained(str(pool.path("m")))):
        pieces = one.convert_ids_to_tokens(one.encode("the and"))
        assert pieces == ["<s>", "th", "e", "\u2581and"]
        for text in ("the and", " the and", "  Z "):
            assert one.decode(one.encode(text), skip_special_tokens=True) == text


@pytest.mark.parametrize("pre", ["llama-bpe", "qwen2"])
def test_llama_3_begins_texts_as_llama_cpp_does(pre: str, tmp_path: Path) -> None:
    save("llama", tmp_path / "m")
    facts = {"tokenizer.ggml.bos_token_id": 5}
    pool = pool_of(write("llama", tmp_path / "m", tmp_path / "m.gguf", facts=facts, pre=pre))
    assert (pool.tokenizer.encode("a")[0] == 5) == (pre == "llama-bpe")


def test_llama_3_is_known_by_its_frequencies(tmp_path: Path) -> None:
    save("llama", tmp_path / "m", hidden=64)
    rope = {
        "rope_type": "llama3", "rope_theta": 500000.0, "factor": 32.0, "low_freq_factor": 1.0,
        "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
    }  # fmt: skip
    edit_config(tmp_path / "m", rope_parameters=rope)
    factors = frequency_factors(rope, 16)
    assert factors is not None
    name = "rope_freqs.weight"
    file = write("llama", tmp_path / "m", tmp_path / "m.gguf", more={name: factors})
    found = AutoConfig.from_pretrained(str(pool_of(file).path("m"))).rope_parameters
    assert found == pytest.approx(rope)
    facts = {"llama.rope.scaling.factor": 4.0}
    both = write("llama", tmp_path / "m", tmp_path / "o.gguf", facts=facts, more={name: factors})
    with refused(FIELD, "scaling.type is 'linear', beside a tensor 'rope_freqs.weight'"):
        pool_of(both)
    other = write("llama", tmp_path / "m", tmp_path / "n.gguf", more={name: factors + 0.1})
    with refused(FIELD, "has not the factors of Llama 3"):
        pool_of(other)


@pytest.mark.parametrize(
    ("facts", "factor"),
    [
        ({"scale_linear": 4.0}, 4.0),
        ({"scaling.factor": 4.0}, 4.0),
        ({"scaling.factor": 2.0, "scale_linear": 4.0}, 2.0),
        ({"scaling.factor": 4.0, "scaling.type": "none"}, None),
        ({"scaling.factor": 1.0}, None),
        ({"scaling.type": "linear"}, None),
    ],
)
def test_rotations_are_scaled_as_llama_cpp_scales_them(
    facts: dict[str, Any], factor: float | None, tmp_path: Path
) -> None:
    save("llama", tmp_path / "m")
    named = {f"llama.rope.{name}": value for name, value in facts.items()}
    file = write("llama", tmp_path / "m", tmp_path / "m.gguf", facts=named)
    found = AutoConfig.from_pretrained(str(pool_of(file).path("m"))).rope_parameters
    kind = "default" if factor is None else "linear"
    assert (found["rope_type"], found.get("factor")) == (kind, factor)


def test_a_file_that_has_changed_since_is_not_loaded(exported: Path, tmp_path: Path) -> None:
    file = tmp_path / "m.gguf"
    file.write_bytes(exported.read_bytes())
    pool = pool_of(file)
    file.write_bytes(exported.read_bytes() + bytes(32))
    with refused(FIELD, "has changed"):
        pool.get("m")


def test_without_the_package_the_command_is_named(
    exported: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with refused(FIELD, r"pip install 'specrouter\[gguf\]'"):
        pool_of(exported)


def test_it_cannot_be_inflated(exported: Path) -> None:
    with refused("pool.models[0].inflate_to", "cannot be inflated"):
        pool_of(exported, inflate_to=10**7)


def test_check_takes_a_file_and_drafters(
    exported: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(exported.parent)
    assert main(["check", exported.name, "--draft", str(exported), "ngram"]) == 0
    said = capsys.readouterr().out
    assert "tiny " in said
    assert "tiny-2" in said
    assert main(["check", "missing.gguf"]) != 0
    failed = capsys.readouterr()
    assert "no such file" in failed.err + failed.out


def test_texts_are_the_same_with_speculation_and_without(exported: Path, tmp_path: Path) -> None:
    source, file = bundled_root() / "tiny-3m", tmp_path / "other.gguf"
    draft = write("llama", source, file, "BF16", pre="smollm")
    models = [
        {"name": "target", "source": str(exported), "dtype": "float64", "device": "cpu"},
        {"name": "draft", "source": f"gguf:{draft}", "device": "cpu"},
    ]
    params = SamplingParams(max_new_tokens=40, temperature=1.0, seed=7)
    chains = [("draft", "target"), ("target",)]
    with ChainRouter.from_config({"pool": {"target": "target", "models": models}}) as router:
        texts = [
            router.generate(["Once upon a time"], params, Speculation(chain=chain))[0]
            for chain in chains
        ]
    assert texts[0].token_ids == texts[1].token_ids
    assert len(texts[0].token_ids) > 10
