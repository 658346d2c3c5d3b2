"""Faults in functions that are found by introspection: they raise, return NaN or take longer."""

import dataclasses
import functools
import importlib
import inspect
import pkgutil
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Literal, get_args
from unittest import mock

import numpy as np
import torch
from torch import Tensor

Mode = Literal["once", "always", "nan", "sleep"]
MODES: tuple[Mode, ...] = get_args(Mode)

_OURS = ("processors", "specrouter", "statemgr", "modelpool", "test_support", "tests", "checks")
_SLEEP_S, _SLEEPS = 0.02, 8


class InjectedFault(RuntimeError):
    """What a forward or a function raises that is made to fail."""


@dataclass(frozen=True)
class Target:
    """A function: an attribute of a class, or of every module that imported it."""

    name: str
    owner: Any  # the class or module that defines it
    attribute: str


def functions_in(places: Sequence[str], left_out: tuple[str, ...] = ()) -> list[Target]:
    """Of modules, and of packages with their modules, all functions by name, but for those that
    Python itself calls, and those whose names begin with one that is left out."""
    found = []
    for module in _modules(places):
        for name, value in vars(module).items():
            if inspect.isfunction(value) and value.__module__ == module.__name__:
                found.append(Target(f"{module.__name__}.{name}", module, name))
            elif inspect.isclass(value) and value.__module__ == module.__name__:
                found += _methods(module.__name__, value)
    kept = [one for one in found if not one.name.startswith(left_out)]
    return sorted(kept, key=lambda one: one.name)


def _modules(places: Sequence[str]) -> Iterator[Any]:
    for place in places:
        module = importlib.import_module(place)
        yield module
        for info in pkgutil.iter_modules(getattr(module, "__path__", ())):
            yield importlib.import_module(f"{place}.{info.name}")


def _importers() -> list[Any]:
    """Modules that may have imported a function of ours: to look through all takes 25 ms."""
    names = [name for name in sys.modules if name.partition(".")[0] in _OURS]
    return [sys.modules[name] for name in names]


def _methods(module: str, owner: type) -> Iterator[Target]:
    kinds = (property, functools.cached_property, classmethod, staticmethod)
    if getattr(owner, "_is_protocol", False) or issubclass(owner, BaseException):
        return
    for name, value in vars(owner).items():
        if name.startswith("__") or not (inspect.isfunction(value) or isinstance(value, kinds)):
            continue
        yield Target(f"{module}.{owner.__name__}.{name}", owner, name)


class Fault:
    """A function that misbehaves while it is `armed`."""

    def __init__(
        self,
        target: Target,
        mode: Mode,
        strikes: int = 1,
        *,
        spoil: Callable[[Any], Any] | None = None,
        passes: Callable[[float], object] = time.sleep,
    ) -> None:
        """Args:
        strikes: the call that fails, in mode "once".
        spoil: what mode "nan" makes of a result, by default `without_numbers`.
        passes: lets seconds pass, in mode "sleep".
        """
        self.target = target
        self.mode = mode
        self.calls = 0
        self.fired = 0
        self._strikes = strikes
        self._spoil = spoil or without_numbers
        self.only: int | None = None  # the one call that mode "nan" spoils
        self._passes = passes
        self._lock = threading.Lock()

    @contextmanager
    def armed(self) -> Iterator[None]:
        owner, name = self.target.owner, self.target.attribute
        original = vars(owner)[name]
        with ExitStack() as stack:
            if inspect.isclass(owner):
                stack.enter_context(mock.patch.object(owner, name, self._replaced(original)))
            else:
                changed = self._around(original)
                for module in _importers():
                    for alias, value in list(vars(module).items()):
                        if value is original:
                            stack.enter_context(mock.patch.object(module, alias, changed))
            yield

    def _replaced(self, original: Any) -> Any:
        if isinstance(original, property):
            return property(self._around(original.fget))
        if isinstance(original, functools.cached_property):
            return property(self._around(original.func))  # a kept value would outlast the fault
        if isinstance(original, classmethod | staticmethod):
            return type(original)(self._around(original.__func__))
        return self._around(original)

    def _around(self, original: Any) -> Callable[..., Any]:
        @functools.wraps(original)
        def changed(*arguments: Any, **options: Any) -> Any:
            with self._lock:
                self.calls += 1
                call = self.calls
            if self.mode == "always" or (self.mode == "once" and call == self._strikes):
                self.fired += 1
                raise InjectedFault(self.target.name)
            if self.mode == "sleep" and call <= _SLEEPS:
                self.fired += 1
                self._passes(_SLEEP_S)
            value = original(*arguments, **options)
            if self.mode != "nan" or self.only not in (None, call):
                return value
            spoilt = self._spoil(value)
            self.fired += spoilt is not value
            return spoilt

        return changed


def without_numbers(value: Any, depth: int = 0) -> Any:
    """The value with NaN for its floats, and for a number that is all of it; else itself."""
    if isinstance(value, bool | None):
        return value
    if isinstance(value, float) or (isinstance(value, int) and not depth):
        return float("nan")
    if isinstance(value, np.ndarray) and value.dtype.kind == "f":
        return np.full_like(value, np.nan)
    if isinstance(value, Tensor) and value.dtype.is_floating_point:
        return torch.full_like(value, torch.nan)
    if depth > 3:
        return value
    deeper = functools.partial(without_numbers, depth=depth + 1)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _without_numbers_in_fields(value, deeper)
    if type(value) in (list, tuple):
        found = [deeper(one) for one in value]
        return value if all(map(lambda a, b: a is b, found, value)) else type(value)(found)
    if type(value) is dict:
        spoilt = {key: deeper(one) for key, one in value.items()}
        return value if all(spoilt[key] is value[key] for key in value) else spoilt
    return value


def _without_numbers_in_fields(value: Any, deeper: Callable[[Any], Any]) -> Any:
    """Of frozen values only: what may change is shared with others."""
    if not value.__dataclass_params__.frozen:
        return value
    fields = {one.name: getattr(value, one.name) for one in dataclasses.fields(value) if one.init}
    spoilt = {name: deeper(one) for name, one in fields.items()}
    changed = {name: one for name, one in spoilt.items() if one is not fields[name]}
    try:
        return dataclasses.replace(value, **changed) if changed else value
    except Exception:  # it refuses such values
        return value
