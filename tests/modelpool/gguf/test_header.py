"""Damaged, cut and unknown GGUF files: each is refused in one line, before memory is taken."""

from __future__ import annotations

import struct
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from modelpool.gguf.header import read_header
from test_support.factories import pool_of
from tests.modelpool.gguf.files import save, write
from tests.modelpool.refused import refused

FIELD = "pool.models[0].source"
MOST_BYTES = 8e6  # that a refusal takes

Damage = Callable[[bytes], bytes]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    folder = tmp_path_factory.mktemp("whole")
    save("llama", folder / "m")
    return write("llama", folder / "m", folder / "m.gguf", "Q8_0").read_bytes()


def at(place: int, form: str, value: int) -> Damage:
    """Another number there."""
    size = struct.calcsize(form)
    return lambda data: data[:place] + struct.pack(form, value) + data[place + size :]


def after(text: str, skip: int, form: str, value: int) -> Damage:
    """Another number, `skip` bytes after a text first stands there."""

    def damaged(data: bytes) -> bytes:
        return at(data.index(text.encode()) + len(text) + skip, form, value)(data)

    return damaged


def instead(old: str, new: str) -> Damage:
    """Another text of the same length, where it first stands."""
    assert len(old) == len(new)
    return lambda data: data.replace(old.encode(), new.encode(), 1)


# After a tensor's name: dimensions (4 bytes), shape (8 each), type (4), offset (8).
UP, NORM = "blk.0.ffn_up.weight", "blk.1.attn_norm.weight"
DAMAGES: dict[str, tuple[Damage, str]] = {
    "empty": (lambda data: b"", "is empty"),
    "three bytes": (lambda data: data[:3], "no GGUF file"),
    "magic": (at(0, "<4s", b"GGML"), "magic is not GGUF"),  # type: ignore[arg-type]
    "another format": (lambda data: b"PK\3\4" + data[4:], "magic is not GGUF"),
    "version alone": (lambda data: data[:6], "ends within version"),
    "version 1": (at(4, "<I", 1), "version is 1, not 2 or 3"),
    "version 4": (at(4, "<I", 4), "version is 4"),
    "big-endian": (at(4, ">I", 3), "version is big-endian"),
    "too many tensors": (at(8, "<Q", 10**6), "tensor_count is 1000000, more than"),
    "2**64 tensors": (at(8, "<Q", 2**64 - 1), "tensor_count"),
    "a tensor more": (lambda data: at(8, "<Q", struct.unpack_from("<Q", data, 8)[0] + 1)(data), ""),
    "a tensor less": (
        lambda data: at(8, "<Q", struct.unpack_from("<Q", data, 8)[0] - 1)(data),
        "has no tensor",
    ),
    "too many facts": (at(16, "<Q", 2**60), "metadata_kv_count is"),
    "a fact less": (lambda data: at(16, "<Q", struct.unpack_from("<Q", data, 16)[0] - 1)(data), ""),
    "a name's length": (at(24, "<Q", 2**40), "the length of the name of fact 0"),
    "a name of no length": (at(24, "<Q", 0), "empty or used twice"),
    "a name no UTF-8": (at(32, "<B", 0xFF), "no UTF-8"),
    "a fact's type": (after("llama.block_count", 0, "<I", 77), "block_count is of type 77"),
    "a fact of another type": (after("llama.block_count", 0, "<I", 6), "block_count is no int"),
    "a text's length": (after("general.architecture", 4, "<Q", 2**50), "general.architecture is"),
    "an array's length": (after("ggml.tokens", 8, "<Q", 2**32), "the length of tokenizer"),
    "an array's type": (after("ggml.tokens", 4, "<I", 9), "ggml.tokens is of type 9"),
    "a shorter array": (after("ggml.tokens", 8, "<Q", 5), ""),
    "layers": (after("llama.block_count", 4, "<I", 10**9), "block_count is 1000000000"),
    "no layers": (after("llama.block_count", 4, "<I", 0), "block_count is 0"),
    "a layer more": (after("llama.block_count", 4, "<I", 3), "has no tensor 'blk.2"),
    "a layer less": (after("llama.block_count", 4, "<I", 1), "has no place|has no tensor"),
    "width": (after("llama.embedding_length", 4, "<I", 64), "embedding_length is 64"),
    "heads": (after("attention.head_count", 4, "<I", 0), "head_count is 0"),
    "other heads": (after("attention.head_count", 4, "<I", 2), "attn_q.weight' is"),
    "key length": (after("attention.key_length", 4, "<I", 4), "key_length"),
    "positions": (after("llama.context_length", 4, "<I", 0), "context_length is 0"),
    "epsilon": (after("layer_norm_rms_epsilon", 4, "<I", 0x7FC00000), "epsilon is nan"),
    "missing fact": (instead("llama.block_count", "llama.block_corps"), "has no llama.block_count"),
    "missing family": (
        instead("general.architecture", "general.architectura"),
        "has no general.architecture",
    ),
    "missing tokens": (instead("ggml.tokens", "ggml.tokenz"), "has no tokenizer.ggml.tokens"),
    "missing model": (instead("tokenizer.ggml.model", "tokenizer.ggml.modex"), "ggml.model"),
    "missing merges": (instead("ggml.merges", "ggml.mergez"), "has no tokenizer.ggml.merges"),
    "unknown splitting": (instead("gpt-2", "gpt-9"), "ggml.pre is 'gpt-9'"),
    "end of text": (after("eos_token_id", 4, "<I", 10**6), "eos_token_id is 1000000"),
    "missing tensor": (instead(UP, "blk.0.ffn_uq.weight"), "has no tensor 'blk.0.ffn_up.weight'"),
    "missing embedding": (instead("token_embd.weight", "token_embx.weight"), "token_embd.weight"),
    "a name twice": (instead("blk.1.ffn_up.weight", UP), "stands there twice"),
    "no dimensions": (after(UP, 0, "<I", 0), "has 0 dimensions"),
    "five dimensions": (after(UP, 0, "<I", 5), "has 5 dimensions"),
    "an empty shape": (after(UP, 4, "<Q", 0), "the shape of tensor 'blk.0.ffn_up.weight'"),
    "a huge shape": (after(UP, 4, "<Q", 2**62), "the shape of tensor"),
    "a larger shape": (after(UP, 12, "<Q", 2**30), "ends beyond the file"),
    "another shape": (after(UP, 12, "<Q", 32), "ffn_up.weight' is|overlap"),
    "part of a block": (after(UP, 4, "<Q", 33), "no multiple of 32"),
    "an unknown type": (after(UP, 20, "<I", 200), "is of type 200, which is not read"),
    "a type not read": (after(UP, 20, "<I", 16), "is of type 16"),
    "a wider type": (after(UP, 20, "<I", 0), "overlap|beyond"),
    "an offset": (after(NORM, 16, "<Q", 2**40), "ends beyond the file"),
    "an odd offset": (after(NORM, 16, "<Q", 33), "is not aligned: 33"),
    "overlapping tensors": (after(NORM, 16, "<Q", 0), "overlap"),
    "cut in the facts": (lambda data: data[:400], ""),
    "cut in the weights": (lambda data: data[:-1000], "download it again"),
    "cut by a byte": (lambda data: data.rstrip(b"\0")[:-1], "download it again"),
    "a pointer": (lambda data: b"version https://git-lfs.github.com/spec/v1\n", "no GGUF file"),
}


@pytest.mark.parametrize("kind", DAMAGES)
def test_a_damaged_file_is_refused_in_a_line(kind: str, whole: bytes, tmp_path: Path) -> None:
    damage, reason = DAMAGES[kind]
    file = tmp_path / "m.gguf"
    file.write_bytes(damage(whole))
    assert file.read_bytes() != whole
    with refused(FIELD, reason):
        pool_of(file)


@pytest.mark.parametrize("kind", [kind for kind in DAMAGES if "2**" in kind or "huge" in kind])
def test_nothing_is_allocated_for_what_a_file_claims(
    kind: str, whole: bytes, tmp_path: Path
) -> None:
    file = tmp_path / "m.gguf"
    file.write_bytes(DAMAGES[kind][0](whole))
    tracemalloc.start()
    with pytest.raises(ValueError, match=r"m\.gguf"):
        read_header(file)
    assert tracemalloc.get_traced_memory()[1] < MOST_BYTES
    tracemalloc.stop()


@pytest.mark.parametrize(
    ("facts", "reason"),
    [
        ({"general.alignment": 12}, "general.alignment is 12"),
        ({"split.count": 3, "split.no": 1}, "give the first"),
        ({"split.count": 2, "split.no": 0}, "give the first"),
        ({"llama.rope.dimension_count": 4}, "rope.dimension_count"),
        ({"llama.rope.scaling.type": "longrope"}, "scaling.type is 'longrope'"),
        ({"llama.rope.scaling.type": "yarn"}, "has no llama.rope.scaling.factor"),
        ({"llama.rope.scaling.attn_factor": 0.5}, "scaling.attn_factor is 0.5, and is read as 1.0"),
        ({"tokenizer.chat_template": 5}, "tokenizer.chat_template is no str"),
    ],
)
def test_facts_that_cannot_be_honoured_are_named(
    facts: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    save("llama", tmp_path / "m")
    file = write("llama", tmp_path / "m", tmp_path / "m.gguf", facts=facts)
    with refused(FIELD, reason):
        pool_of(file)


@pytest.mark.parametrize("family", ["bert", "mamba", "falcon"])
def test_other_families_are_refused(family: str, whole: bytes, tmp_path: Path) -> None:
    file = tmp_path / "m.gguf"
    place = whole.index(b"general.architecture") + len("general.architecture") + 4
    rest = whole[place + 8 + len("llama") :]
    written = struct.pack("<Q", len(family)) + family.encode()
    file.write_bytes(whole[:place] + written + rest)
    with refused(FIELD, f"general.architecture is '{family}'|download it again|not aligned"):
        pool_of(file)


def test_a_part_that_is_missing_is_named(tmp_path: Path) -> None:
    save("qwen2", tmp_path / "m")
    write("qwen2", tmp_path / "m", tmp_path / "m.gguf", split=10)
    parts = sorted(tmp_path.glob("m-*.gguf"))
    with refused(FIELD, "give the first"):
        pool_of(parts[1])
    parts[1].rename(tmp_path / "away")
    with refused(FIELD, f"'{parts[1].name}' is not beside it"):
        pool_of(parts[0])


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with refused(FIELD, "has no GGUF files"):
        pool_of(tmp_path / "m.gguf")
    for name in ("mm.gguf", *(f"other-{n}.gguf" for n in range(9))):
        (tmp_path / name).touch()
    with refused(FIELD, "no such file; in this folder: mm.gguf, .* and 2 others"):
        pool_of(tmp_path / "m.gguf")
