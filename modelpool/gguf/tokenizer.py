"""The tokenizer and the chat template of a GGUF file, by the converter of `transformers`.

Tokens that the file calls unused must never be chosen. Those after all others, with which
embeddings are padded, are left out: the vocabulary ends before them, and their logits are never
read. The tokenizer's option `UNUSED_IDS` has those between others, which cost a ban for each token:
no released file that was inspected has any.
"""

from collections.abc import Collection
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast
from transformers.integrations.gguf.gguf_tokenizer_mapping import (
    GGUF_PRE_TOKENIZER_SPLITS,
    GGUF_TOKENIZER_MAPPING,
    convert_gguf_tokenizer,
)

from modelpool.checkpoint.tokenizers import UNUSED_IDS
from modelpool.errors import ConfigError
from modelpool.gguf.header import GgufHeader

_MODEL, _PRE, _TOKENS = (f"tokenizer.ggml.{name}" for name in ("model", "pre", "tokens"))
_PREFIX, _SPACE = "tokenizer.ggml.add_space_prefix", "\u2581"
_BYTE_LEVEL, _SENTENCEPIECE, _MERGED = "gpt2", "llama", "gemma4"
_KINDS = (_BYTE_LEVEL, _SENTENCEPIECE, _MERGED)
_DIGITS = ("smollm", "refact", "starcoder")  # split off each digit, then split as `gpt-2`
_PLAIN = ("gpt-2", "gpt2", "olmo", "granite-docling")
# Split by one pattern after the other. Source: `tokenizer.json` of DeepSeek's models, and of GLM-4.
_HAN = r"[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
_CASED = (
    r"[\p{Lu}\p{Ll}\p{Lt}&&[^\u0560-\u0588\u10c7-\u10ff\u1c80-\u1c8a\u2d00-\u2d2d\ua790-\uab68"
    r"\x{10570}-\x{105bc}\x{10d50}-\x{10d85}\x{16e40}-\x{1e8ff}]]+"
)
_SPLITS = {
    "glm4": (GGUF_PRE_TOKENIZER_SPLITS["llama3"],),
    "chatglm-bpe": (GGUF_PRE_TOKENIZER_SPLITS["llama3"],),
    "deepseek-llm": (
        r"[\r\n]",
        rf"\s?{_CASED}",
        r"\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+",
        r"\s+$",
        _HAN,
        r"\p{N}+",
    ),
    "deepseek-coder": (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _HAN, r"\p{N}"),
    "deepseek-v3": (
        r"\p{N}{1,3}",
        r"[\u4e00-\u9fa5\u3040-\u30ff]+",
        r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
        r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    ),
}
# Kinds whose texts begin with a token in llama.cpp, unless the file says otherwise.
_BEGUN = (
    "llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "tekken", "midm-2.0",
    "lfm2", "jina-v5-nano",
)  # fmt: skip
_UNUSED = 5  # value in tokenizer.ggml.token_type
_BY_TOKEN = ("tokens", "scores", "token_type")
_WHOLE_WORDS = (*_BEGUN, "glm4")  # a word that is a token stays whole, with any merges
_SPECIAL = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}


def tokenizer_of(header: GgufHeader, ends: Collection[int]) -> PreTrainedTokenizerFast:
    """Build the tokenizer; raise `ConfigError` if it would split text differently from the file.

    Args:
        header: header of the file.
        ends: ids that end a text, whatever their type in the file.
    """
    kind, tokens = header.fact(_MODEL, str), header.fact(_TOKENS, list)
    if kind not in _KINDS:
        raise header.error(f"{_MODEL} is {kind!r}, not one of {', '.join(_KINDS)}")
    _check(header, tokens, kind)
    pre = header.fact(_PRE, str, "default") if kind == _BYTE_LEVEL else None
    known = (*GGUF_PRE_TOKENIZER_SPLITS, *_SPLITS, *_PLAIN, *_DIGITS)
    if pre is not None and pre not in known:
        raise header.error(f"{_PRE} is {pre!r}: how it splits text is not known")
    names = GGUF_TOKENIZER_MAPPING["tokenizer"].items()
    facts = {name: header.facts[f"tokenizer.{key}"] for key, name in names
             if f"tokenizer.{key}" in header.facts}  # fmt: skip
    unused = _unused(header, tokens) - {*ends}
    count = max((one + 1 for one in range(len(tokens)) if one not in unused), default=0)
    facts |= {name: facts[name][:count] for name in _BY_TOKEN if name in facts}
    try:
        backend: Tokenizer = convert_gguf_tokenizer(header.facts["general.architecture"], facts)[0]
    except Exception as error:  # the tokenizers library raises bare exceptions
        reason = f"the tokenizer cannot be made: {type(error).__name__}: {error}"
        raise ConfigError("", f"{str(header.file)!r}: {reason}") from error
    if pre in _SPLITS:
        bytes_alone = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        splits = [pre_tokenizers.Split(Regex(one), "isolated") for one in _SPLITS[pre]]
        backend.pre_tokenizer = pre_tokenizers.Sequence([*splits, bytes_alone])
    if pre in _DIGITS:
        split = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
        digits = pre_tokenizers.Digits(individual_digits=True)
        backend.pre_tokenizer = pre_tokenizers.Sequence([digits, split])
    if kind == _SENTENCEPIECE and not header.fact(_PREFIX, bool, True):
        _leave_out_prefix(backend)
    if pre in _WHOLE_WORDS:
        backend.model.ignore_merges = True
    special = _special(header, tokens)
    _put_around(header, backend, special, kind == _SENTENCEPIECE or pre in _BEGUN)
    template = header.fact("tokenizer.chat_template", str, "")
    options: dict[str, Any] = {"chat_template": template} if template else {}
    within = sorted(one for one in unused if one < count)
    options |= {UNUSED_IDS: within} if within else {}
    make: Any = PreTrainedTokenizerFast
    tokenizer: PreTrainedTokenizerFast = make(tokenizer_object=backend, **special, **options)
    if len(tokenizer) != count:
        raise header.error(f"{_TOKENS} has {count}, and makes {len(tokenizer)} ids")
    return tokenizer


def _leave_out_prefix(backend: Tokenizer) -> None:
    """Make the tokenizer put no space before texts, and remove none.

    The converter does not read `_PREFIX`.
    """
    if backend.normalizer is not None:  # Gemma's, which puts none there
        return
    backend.pre_tokenizer = pre_tokenizers.Metaspace(_SPACE, prepend_scheme="never", split=False)
    steps: Any = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence(steps)


def _check(header: GgufHeader, tokens: list[Any], kind: str) -> None:
    texts = ["tokens", *["merges"] * (kind != _SENTENCEPIECE)]
    for name in texts:
        found = header.fact(f"tokenizer.ggml.{name}", list)
        if not all(isinstance(one, str) for one in found):
            raise header.error(f"tokenizer.ggml.{name} is no list of texts")
    if len(set(tokens)) != len(tokens):
        raise header.error(f"{_TOKENS} has a token twice")
    numbers = ["token_type"] * ("tokenizer.ggml.token_type" in header.facts)
    for name in (*numbers, *["scores"] * (kind == _SENTENCEPIECE)):
        found = header.fact(f"tokenizer.ggml.{name}", list)
        if len(found) != len(tokens) or not all(isinstance(one, int | float) for one in found):
            raise header.error(f"tokenizer.ggml.{name} has not a number for each token")


def _unused(header: GgufHeader, tokens: list[Any]) -> set[int]:
    """Return the unused ids, without the special ones that the file names."""
    kinds: list[Any] = header.facts.get("tokenizer.ggml.token_type", [])
    special = set(_special(header, tokens).values())
    return {one for one, kind in enumerate(kinds) if kind == _UNUSED and tokens[one] not in special}


def _special(header: GgufHeader, tokens: list[Any]) -> dict[str, str]:
    found = dict[str, str]()
    for name, stored in _SPECIAL.items():
        key = f"tokenizer.ggml.{stored}_token_id"
        if key in header.facts:
            index = header.fact(key, int)
            if not 0 <= index < len(tokens):
                raise header.error(f"{key} is {index}, and there are {len(tokens)} tokens")
            found[f"{name}_token"] = tokens[index]
    return found


def _put_around(
    header: GgufHeader, backend: Tokenizer, special: dict[str, str], adds_bos: bool
) -> None:
    """Set the tokens that begin and end a text, as the file asks for them.

    `adds_bos`: default if the file does not say.
    """
    pattern = ["$A"]
    if _asks(header, "bos", adds_bos) and "bos_token" in special:
        pattern.insert(0, special["bos_token"])
    if _asks(header, "eos", False) and "eos_token" in special:
        pattern.append(special["eos_token"])
    ids = [(one, backend.token_to_id(one)) for one in sorted({*pattern} - {"$A"})]
    around: Any = processors.TemplateProcessing(single=pattern, special_tokens=ids)
    backend.post_processor = around


def _asks(header: GgufHeader, name: str, default: bool) -> bool:
    return header.fact(f"tokenizer.ggml.add_{name}_token", bool, default)
