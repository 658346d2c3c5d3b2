"""PlaceTracker: which values of a forward depend on where a token stands in the pack.

A pack holds tokens of several requests; only their positions may tell them apart. A model that
counts the tokens of the pack itself (`arange(length)`) gives a token other logits among other
neighbours. Every operation of a forward is seen: what is made by counting is marked, and so is
whatever is computed from it. To be an index leaves no mark, since who gathers by a counted index
and puts back by it (experts do) computes the same for any place; the rows of an embedding are the
exception.

Works on any device, the meta device included. Not seen: counts that never are tensors.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

_COUNTING = frozenset({"aten::arange", "aten::range", "aten::linspace"})
_RUNNING = frozenset({"aten::cumsum", "aten::cumprod", "aten::cummax", "aten::logcumsumexp"})
# By operation, which argument is an index.
_INDEX: Mapping[str, int] = {
    **dict.fromkeys(("index", "index_put", "index_put_", "_unsafe_index"), 1),
    **dict.fromkeys(("index_select", "index_add", "index_add_", "index_copy", "index_copy_"), 2),
    **dict.fromkeys(("gather", "scatter", "scatter_", "scatter_add", "scatter_add_"), 2),
}


class PlaceTracker(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Args: `tokens`: of the pack; counts of other lengths are of no interest."""

    def __init__(self, tokens: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._tokens = tokens
        self._marked: dict[int, Tensor] = {}  # by identity; kept, so that none is used again
        self._is_paused = False

    def depends(self, tensor: Tensor) -> bool:
        return id(tensor) in self._marked

    @contextmanager
    def paused(self) -> Iterator[None]:
        self._is_paused = True
        try:
            yield
        finally:
            self._is_paused = False

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if self._is_paused:
            return result
        name = func.name().partition(".")[0]  # type: ignore[attr-defined]
        outputs = [one for one in _flat((result,)) if isinstance(one, Tensor)]
        if self._counts(name, args, outputs) or self._uses_marked(name, args, kwargs):
            if name.endswith("_") and not name.endswith("__"):
                outputs += [one for one in args[:1] if isinstance(one, Tensor)]
            self._marked.update((id(one), one) for one in outputs)
        return result

    def _counts(self, name: str, args: tuple[Any, ...], outputs: Sequence[Tensor]) -> bool:
        """Whether the operation numbers the tokens of the pack."""
        if name in _COUNTING:
            return any(one.numel() == self._tokens for one in outputs)
        if name in _RUNNING:
            return args[0].shape[args[1]] == self._tokens if args[0].ndim else False
        return False

    def _uses_marked(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        index = _INDEX.get(name.removeprefix("aten::"))
        used = [one for place, one in enumerate(args) if place != index]
        used += list(kwargs.values())
        return any(isinstance(one, Tensor) and self.depends(one) for one in _flat(used))


def _flat(values: Sequence[Any]) -> Iterator[Any]:
    for value in values:
        if isinstance(value, list | tuple):
            yield from _flat(value)
        else:
            yield value
