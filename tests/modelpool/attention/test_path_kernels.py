"""The kernels of path attention by Triton's interpreter, or on a GPU where there is one."""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from modelpool.attention.kv_view import AttentionLayer
from modelpool.attention.path import KeyPaths, reference
from test_support.packs import Pack, changed, on
from test_support.triton_interpreter import DEVICE, needs_triton
from tests.pairwise import pairwise

pytestmark = [needs_triton, pytest.mark.long]

# Prefixes and trees that end within, at and behind the end of a split of 256 keys.
PACKS = {
    "tree": Pack((250, 3), (9, 4)),
    "two splits": Pack((300,), (5,), seed=1),
    "at the edge": Pack((254, 0), (4, 3), seed=2),
}
# Of values of about 1; the interpreter cuts numbers off to bfloat16 and does not round them.
ERRORS = {torch.float32: 1e-6, torch.float16: 5e-4, torch.bfloat16: 8e-3}
CASES = pairwise(
    dim=(32, 64, 128),
    group=(1, 3, 7),
    window=(None, 5, 260),
    softcap=(None, 1.5, 50.0),
    sinks=(None, -3.0, 3.0),  # the least of them
    dtype=tuple(ERRORS),
    pack=tuple(PACKS),
)


def run(
    query: Tensor, keys: Tensor, values: Tensor, paths: KeyPaths, how: AttentionLayer
) -> Tensor:
    from modelpool.attention.path_kernels import path_attention

    query, keys, values = (part.to(DEVICE) for part in (query, keys, values))
    how = replace(how, sinks=None if how.sinks is None else how.sinks.to(DEVICE))
    return path_attention(query, keys, values, on(paths, DEVICE), how).cpu()


def made(case: dict[str, Any]) -> tuple[Pack, tuple[Tensor, Tensor, Tensor], AttentionLayer]:
    pack = PACKS[case["pack"]]
    tensors = pack.tensors(2, case["group"], case["dim"], case["dtype"])
    sinks = None if case["sinks"] is None else case["sinks"] + torch.arange(2 * case["group"]) / 4
    how = AttentionLayer(0, case["dim"] ** -0.5, case["window"], case["softcap"], sinks)
    return pack, tensors, how


@pytest.fixture(autouse=True)
def new_memory_holds_no_numbers() -> Iterator[None]:
    was = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)  # which fills it with NaN
    yield
    torch.use_deterministic_algorithms(was)


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case.values())))
def test_path_attention_is_attention_in_float64_and_a_tree_has_the_bits_of_chains(
    case: dict[str, Any],
) -> None:
    pack, (query, keys, values), how = made(case)
    got = run(query, keys, values, pack.paths, how)
    wanted = reference(query.double(), keys.double(), values.double(), pack.paths, how)
    largest = wanted.abs().max() if case["dtype"] != torch.float32 else 1.0
    assert (got.double() - wanted).abs().max() / largest <= ERRORS[case["dtype"]]
    assert torch.equal(got, run(query, *pack.as_chains(keys, values), how))


@pytest.mark.parametrize("case", CASES[:3], ids=lambda case: "-".join(map(str, case.values())))
def test_a_token_alone_has_the_bits_that_it_has_among_others(case: dict[str, Any]) -> None:
    pack, (query, keys, values), how = made(case)
    together = run(query, keys, values, pack.paths, how)
    for token in (0, len(query) - 1):
        own = run(
            query[token : token + 1],
            keys,
            values,
            changed(pack.paths, partial(torch.narrow, dim=0, start=token, length=1)),
            how,
        )
        assert torch.equal(own[0], together[token])


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # of the padding
@pytest.mark.parametrize("case", CASES[3:6], ids=lambda case: "-".join(map(str, case.values())))
def test_padding_and_what_nobody_sees_change_no_bit(case: dict[str, Any]) -> None:
    pack, (query, keys, values), how = made(case)
    wanted = run(query, keys, values, pack.paths, how)
    reach = how.window or pack.size
    seen = {slot for slots in pack.slots for slot in slots[-reach:]}
    unseen = [slot for slot in range(pack.size) if slot not in seen]
    keys[unseen], values[unseen] = torch.nan, torch.nan
    more = torch.cat((query, torch.full_like(query[:3], torch.nan)))
    paths = changed(pack.paths, lambda part: F.pad(part, (0, 0) * (part.dim() - 1) + (0, 2)))
    got = run(more, keys, values, replace(paths, longest=paths.longest + 300), how)
    assert torch.equal(got[: len(query)], wanted)


def test_queries_may_lie_head_by_head() -> None:
    """As layers hand them over: [heads, T, head_dim]."""
    pack, (query, keys, values), how = made(CASES[0])
    turned = query.transpose(0, 1).contiguous().transpose(0, 1)
    assert turned.stride() != query.stride()
    wanted = run(query, keys, values, pack.paths, how)
    assert torch.equal(run(turned, keys, values, pack.paths, how), wanted)
