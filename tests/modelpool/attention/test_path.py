"""The reference of path attention is attention over each token's own keys, in float64."""

import pytest
import torch
from torch import Tensor

from modelpool.attention.kv_view import AttentionLayer
from modelpool.attention.path import reference
from test_support.packs import Pack

PACK = Pack(prefixes=(5, 0, 9), nodes=(6, 4, 1))


def alone(query: Tensor, keys: Tensor, values: Tensor, layer: AttentionLayer) -> Tensor:
    """[heads, dim] of the last token of a text, head by head."""
    group = query.shape[0] // keys.shape[1]
    if layer.window is not None:
        keys, values = keys[-layer.window :], values[-layer.window :]
    out = []
    sinks = layer.sinks if layer.sinks is not None else [-torch.inf] * len(query)
    for head, own in enumerate(query):
        scores = keys[:, head // group] @ own * layer.scale
        if layer.softcap is not None:
            scores = layer.softcap * torch.tanh(scores / layer.softcap)
        weights = torch.cat((scores, torch.as_tensor(sinks[head]).view(1))).softmax(0)[:-1]
        out.append(weights @ values[:, head // group])
    return torch.stack(out)


@pytest.mark.parametrize("group", [1, 3])
@pytest.mark.parametrize("window", [None, 1, 4])
@pytest.mark.parametrize("softcap", [None, 0.7])
@pytest.mark.parametrize("has_sinks", [False, True])
def test_a_token_attends_to_its_own_path_alone(
    group: int, window: int | None, softcap: float | None, has_sinks: bool
) -> None:
    query, keys, values = PACK.tensors(2, group, 8, torch.float64)
    values = values[..., : 5 if has_sinks else 8]
    sinks = torch.arange(2 * group, dtype=torch.float64) - 2.0 if has_sinks else None
    layer = AttentionLayer(0, 0.3, window, softcap, sinks)
    got = reference(query, keys, values, PACK.paths, layer)
    for token, slots in enumerate(PACK.slots):
        wanted = alone(query[token], keys[slots], values[slots], layer)
        torch.testing.assert_close(got[token], wanted, rtol=0, atol=1e-12)


def test_what_no_token_sees_may_be_no_numbers() -> None:
    query, keys, values = PACK.tensors(2, 1, 8, torch.float64)
    layer = AttentionLayer(0, 1.0, window=3)
    wanted = reference(query, keys, values, PACK.paths, layer)
    seen = {slot for slots in PACK.slots for slot in slots[-3:]}
    unseen = [slot for slot in range(PACK.size) if slot not in seen]
    keys[unseen], values[unseen] = torch.nan, torch.nan
    assert torch.equal(reference(query, keys, values, PACK.paths, layer), wanted)
