"""Policies by name: those that come with SpecRouter, and one's own."""

import sys
from fractions import Fraction
from pathlib import Path

import pytest

from modelpool.errors import ConfigError
from specrouter.registry import Registry

HALF = Fraction(1, 2)


def numbers() -> Registry:
    """Two that are built in, and "half" of one's own."""
    built_in = {"third": f"{__name__}:THIRD", "none": f"{__name__}:NONE_SUCH"}
    registry = Registry("kind of number", "fractions:Fraction", built_in)
    registry.register("half", HALF)
    return registry


THIRD = Fraction(1, 3)
NAMES = ("third", "none", "half")


def test_policies_have_names_and_built_in_ones_come_first() -> None:
    registry = numbers()
    assert registry.names == NAMES
    assert registry.find("third") is THIRD
    assert registry.find("half") is HALF
    assert registry.names == NAMES
    registry.register("half", Fraction(2, 4))
    assert registry.find("half") is not HALF, "an earlier one of one's own may be replaced"
    assert numbers().find("half") is HALF, "each registry has its own"


def test_a_name_is_checked_without_an_import_where_it_is_a_built_in_one() -> None:
    registry = numbers()
    for name in (*NAMES, f"{__name__}:HALF"):
        registry.check(name)
    for name in ("quarter", "no_such:HALF", "math:pi"):
        with pytest.raises(ConfigError):
            registry.check(name)


def test_a_built_in_policy_cannot_be_replaced() -> None:
    registry = numbers()
    with pytest.raises(ValueError, match="'third' is a kind of number that comes with SpecRouter"):
        registry.register("third", HALF)
    assert registry.find("third") is THIRD


@pytest.mark.parametrize("policy", [0.5, "half", Fraction, None])
def test_what_is_of_another_type_cannot_be_registered(policy: object) -> None:
    registry = numbers()
    with pytest.raises(TypeError, match=r"'half' must be an instance of fractions\.Fraction"):
        registry.register("half", policy)
    assert registry.find("half") is HALF


@pytest.mark.parametrize("name", ["quarter", "", "a.module", ":", "a.module:", ":NAME"])
def test_an_unknown_name_is_answered_with_all_that_are_registered(name: str) -> None:
    with pytest.raises(ConfigError) as caught:
        numbers().find(name)
    assert str(caught.value) == (
        f"no kind of number {name!r}; there are third, none, half, and one's own as"
        " package.module:NAME"
    )


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("no_such:HALF", "ModuleNotFoundError: No module named 'no_such'"),
        (f"{__name__}:QUARTER", f"AttributeError: module '{__name__}' has no attribute 'QUARTER'"),
        ("none", f"AttributeError: module '{__name__}' has no attribute 'NONE_SUCH'"),
        ("math:pi", "TypeError: 'math:pi' must be an instance of fractions.Fraction"),
        ("..up:HALF", "TypeError: the 'package' argument is required"),
    ],
)
def test_a_failed_import_is_one_line_that_names_the_policy_and_the_reason(
    name: str, reason: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        numbers().find(name)
    assert str(caught.value).startswith(f"kind of number {name!r}: {reason}")
    assert "\n" not in str(caught.value)
    assert caught.value.__cause__ is not None


def module(folder: Path, patch: pytest.MonkeyPatch, text: str) -> str:
    """A module of its own for each test, by its name."""
    name = f"module_of_{folder.name}"
    (folder / f"{name}.py").write_text(text)
    patch.syspath_prepend(folder)
    patch.delitem(sys.modules, name, raising=False)
    return name


def test_a_policy_is_imported_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = "import fractions\nHALF = fractions.Fraction(1, 2)\n"
    name = module(tmp_path, monkeypatch, text)
    registry = numbers()
    first = registry.find(f"{name}:HALF")
    monkeypatch.delitem(sys.modules, name)
    (tmp_path / f"{name}.py").write_text("raise RuntimeError")
    assert registry.find(f"{name}:HALF") is first


def test_what_could_not_be_imported_is_looked_for_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    registry, later = numbers(), f"module_of_{tmp_path.name}:HALF"
    with pytest.raises(ConfigError):
        registry.find(later)
    module(tmp_path, monkeypatch, "import fractions\nHALF = fractions.Fraction(1, 2)\n")
    assert registry.find(later) == HALF
