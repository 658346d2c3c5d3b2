"""A text is the same to the last token, and its log-probabilities to the last bit, however it is
served, where a last bit can become another token.

Weights are in 4 bits, so activations are rounded to 8, and outliers leave most of them few levels.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import pytest

from specrouter import ChainRouter, SamplingParams
from test_support.arrangements import ARRANGEMENTS, REFERENCE, Arrangement, Asked, serve
from tests.modelpool.compressed import needs_quantised
from tests.modelpool.gguf.files import save, write
from tests.modelpool.outliers import plant

NEW_TOKENS = 24
PROMPTS = (270, 40, 130, 75, 200, 330)  # tokens of each
KEPT = Arrangement(name="kept", drafts="asked", caches=True)  # for later ones to quote


@dataclass(frozen=True)
class Shape:
    """Query heads, those of keys and values, and their size."""

    family: str
    heads: int
    kv_heads: int
    head_dim: int

    def __str__(self) -> str:
        return f"{self.family}-{self.heads}-{self.kv_heads}-{self.head_dim}"


SHAPES = (
    Shape("llama", 9, 3, 64),  # SmolLM2-135M
    Shape("qwen2", 14, 2, 64),  # Qwen2.5-0.5B
    pytest.param(Shape("llama", 4, 4, 128), marks=pytest.mark.exact),
    pytest.param(Shape("llama", 8, 1, 64), marks=pytest.mark.exact),
    Shape("gemma2", 4, 2, 64),  # windows, capped scores
)


@pytest.fixture(scope="module", params=SHAPES, ids=str)
def router(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ChainRouter]:
    shape: Shape = request.param
    folder = tmp_path_factory.mktemp(str(shape))
    sizes = {"heads": shape.heads, "kv_heads": shape.kv_heads, "head_dim": shape.head_dim}
    checkpoint = save(shape.family, folder / "m", hidden=32 * shape.heads, layers=4, **sizes)
    if shape.family != "gemma2":  # whose norms are others
        plant(checkpoint, factor=8.0)
    file = write(shape.family, checkpoint, folder / "m.gguf", "Q4_1")
    model = {"name": "m", "source": str(file), "device": "cpu"}
    model |= {"dtype": "float32", "weights": "exact"}
    pool = {"target": "m", "models": [model, {"name": "suffix", "source": "suffix"}]}
    engine = {"max_requests": 4, "max_model_len": 512, "prefill_chunk": 64}
    with ChainRouter.from_config({"pool": pool, "engine": engine}) as router:
        yield router


def requests() -> list[Asked]:
    """Greedy and sampled ones in turns."""
    draws = np.random.default_rng(0)
    usual = SamplingParams(max_new_tokens=NEW_TOKENS, ignore_eos=True, logprobs=0)
    return [
        Asked(
            tuple(draws.integers(0, 300, length).tolist()),
            replace(usual, seed=seed, temperature=0.8 * (seed % 2)),
        )
        for seed, length in enumerate(PROMPTS)
    ]


@needs_quantised
def test_drafts_caches_batches_chunks_and_preemptions_change_no_bit(router: ChainRouter) -> None:
    asked = requests()
    alone = serve(router, asked, REFERENCE)
    assert len({token for text in alone.texts for token in text}) > NEW_TOKENS, "they vary"
    serve(router, asked, KEPT)
    other = dict[str, tuple[int, int]]()  # texts and log-probabilities, of how many requests
    for usual in ARRANGEMENTS:
        share = 0.5 if usual.preempted else 0.0
        own = replace(usual, drafts="asked", before=None, tenant=None, preempted=share)
        served = serve(router, asked, own)
        assert served.signs["accepted"], f"{usual.name}: no draft was accepted"
        assert served.missing(usual) == [], f"{usual.name} did not come about"
        counts = len(served.differing(alone.texts)), len(served.differing_in_bits(alone))
        if any(counts):
            other[usual.name] = counts
    assert not other, f"texts and log-probabilities that differ, of {len(asked)}: {other}"


@needs_quantised
def test_keys_and_values_beside_quantised_weights_are_kept_in_float16(router: ChainRouter) -> None:
    layers = router.pool.get("m").kv_layers.values()
    assert {str(layer.dtype) for layer in layers} == {"torch.float16"}
