"""What depends on a token's place in the pack is told apart from what depends on its position."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from modelpool.place_tracker import PlaceTracker

TOKENS = 7


def marked(forward: Callable[[Tensor], Tensor]) -> bool:
    """Whether what `forward` makes of a pack's positions depends on places in the pack."""
    tracker = PlaceTracker(TOKENS)
    positions = torch.arange(TOKENS, device="meta")
    with torch.inference_mode(), tracker:
        return tracker.depends(forward(positions))


def places() -> Tensor:
    return torch.arange(TOKENS, device="meta")


def test_what_is_computed_from_a_count_of_the_pack_is_marked() -> None:
    values = torch.empty(TOKENS, 3, device="meta")
    assert marked(lambda _: values * torch.log1p(places() / 8.0).unsqueeze(1))
    assert marked(lambda _: values.clone().mul_(places().unsqueeze(1)))
    assert marked(lambda _: torch.where(places()[:, None] > 3, values, -values))
    assert marked(lambda _: torch.cat((values[:2], (places()[2:, None] * values[2:]))))
    assert marked(lambda _: nn.Embedding(9, 4, device="meta")(places()))
    assert marked(lambda _: values.cumsum(0))


def test_what_is_computed_from_positions_is_not() -> None:
    values = torch.empty(TOKENS, 3, device="meta")
    assert not marked(lambda positions: values * torch.log1p(positions / 8.0).unsqueeze(1))
    assert not marked(lambda positions: nn.Embedding(9, 4, device="meta")(positions))
    assert not marked(lambda _: values * torch.arange(3, device="meta"))


def test_a_counted_index_alone_marks_nothing() -> None:
    values = torch.empty(TOKENS, 3, device="meta")
    assert not marked(lambda _: values[places().repeat_interleave(2)])
    assert not marked(lambda _: values.index_select(0, places()))
    assert not marked(lambda _: torch.zeros_like(values).index_add_(0, places(), values))
