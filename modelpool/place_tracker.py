"""PlaceTracker: finds values of a forward that depend on the place of a token in the pack.

A pack holds tokens of several requests; only their positions may distinguish them. A model that
counts the tokens of the pack itself (`arange(length)`) gives a token other logits among other
neighbours. The tracker sees every operation of a forward: results of counting are marked, and so is
all that is computed from them. Use as an index leaves no mark, because code that gathers by a
counted index and scatters by it (experts do) computes the same for any place; the rows of an
embedding are the exception.

Works on any device, including the meta device. Counts that never are tensors are not seen.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

_COUNTING = frozenset({"aten::arange", "aten::range", "aten::linspace"})
_RUNNING = frozenset({"aten::cumsum", "aten::cumprod", "aten::cummax", "aten::logcumsumexp"})
# Position of the index among the arguments, by operation.
_INDEX: Mapping[str, int] = {
    **dict.fromkeys(("index", "index_put", "index_put_", "_unsafe_index"), 1),
    **dict.fromkeys(("index_select", "index_add", "index_add_", "index_copy", "index_copy_"), 2),
    **dict.fromkeys(("gather", "scatter", "scatter_", "scatter_add", "scatter_add_"), 2),
}


class PlaceTracker(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Mode that marks tensors; counts of other lengths than `tokens` of the pack are ignored."""

    def __init__(self, tokens: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._tokens = tokens
        self._marked: dict[int, Tensor] = {}  # by identity; kept, so that no id is used again
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
        """Return whether the operation numbers the tokens of the pack."""
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
