"""FlashInfer's kernels against path attention. Skipped
where there is no GPU, or no FlashInfer."""

from importlib.util import find_spec

import pytest
import torch

from modelpool.attention.backend import FLASHINFER
from modelpool.attention.kv_view import AttentionLayer
from modelpool.attention.path import reference
from modelpool.fast.tuning import PLAIN, Tuning
from modelpool.packed_model import PackedModel
from test_support.llama_models import LLAMA_SHAPED, VOCAB, Feeder, feed_tree, make_model
from test_support.packs import Row, View, on, pack_rows_of, paths_of, size_of, tables_of
from test_support.triton_interpreter import DEVICE

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.skipif(not find_spec("flashinfer"), reason="needs flashinfer-python"),
]
ROWS = [
    Row(300, 1, (-1, -1, 0, 2, 2, 4)),
    Row(9, 40, ()),
    Row(0, 3, (-1, 0)),
    Row(1000, 1, ()),
]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("group", [1, 7])
@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize(("window", "softcap"), [(None, None), (5, None), (64, 30.0)])
def test_trees_and_windows_are_path_attention(
    dtype: torch.dtype, group: int, dim: int, window: int | None, softcap: float | None
) -> None:
    random = torch.Generator().manual_seed(0)
    tokens, tables = sum(row.count for row in ROWS), tables_of(ROWS)
    keys, values = torch.randn((2, size_of(ROWS), 2, dim), generator=random).to(DEVICE, dtype)
    query = torch.randn((2 * group, tokens, dim), generator=random).to(DEVICE, dtype)
    paths = on(paths_of(ROWS, tables), DEVICE)
    view = View(pack_rows_of(ROWS, tables), paths, keys, values)
    layer = AttentionLayer(0, dim**-0.5, window, softcap)
    got = FLASHINFER.load()(view, layer, query)  # type: ignore[arg-type]
    queries = query.transpose(0, 1).double()
    wanted = reference(queries, keys.double(), values.double(), view.paths, layer)
    torch.testing.assert_close(got.double(), wanted, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("name", ["llama", "qwen2-windows", "qwen3"])
def test_a_model_says_what_it_says_by_paths_in_torch(name: str) -> None:
    def forward_of(tuning: Tuning) -> PackedModel:
        config = LLAMA_SHAPED[name]()
        config.head_dim = 64
        model = make_model(config, torch.float16)
        return PackedModel.wrap("m", model.to(DEVICE), VOCAB, tuning)  # type: ignore[arg-type]

    by_paths, by_pages = forward_of(PLAIN), forward_of(Tuning(attention=FLASHINFER))
    feeders = [Feeder(one.forward, one) for one in (by_paths, by_pages)]
    for counts in ({0: 6, 1: 6}, {0: 1, 1: 4, 2: 1, 3: 2}, {0: 3, 1: 20}, {3: 1}):
        wanted, got = (feeder.feed(counts) for feeder in feeders)
        torch.testing.assert_close(got, wanted, rtol=5e-2, atol=5e-2)
    wanted = feed_tree(by_paths.forward, by_paths)
    got = feed_tree(by_pages.forward, by_pages)
    torch.testing.assert_close(got, wanted, rtol=5e-2, atol=5e-2)
