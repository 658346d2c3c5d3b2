"""What has been reached stays reached, and the measures count what they say."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest

from checks.measures import decision_code, structure
from checks.measures.catalog import measures
from checks.measures.ratchet import MOST
from checks.measures.sources import Source, Sources
from checks.measures.table import Measure, lines_of

ROOT = Path(__file__).resolve().parents[2]


@cache
def found() -> dict[str, Measure]:
    """Of this work tree, by name. It takes seconds, which a process without these tests spares."""
    return {one.name: one for one in measures(ROOT)}


@pytest.mark.parametrize("name", MOST)
def test_a_measure_gets_no_worse(name: str) -> None:
    one = found()[name]
    assert one.now is not None
    assert one.now <= MOST[name], one.details


def sources(tmp_path: Path, **files: str) -> Sources:
    """Written as `package__module`."""
    for name, text in files.items():
        path = (tmp_path / name.replace("__", "/")).with_suffix(".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return Sources.of(tmp_path)


def test_floors_are_the_longest_chain_of_rooms_wherever_an_import_stands(tmp_path: Path) -> None:
    found = sources(
        tmp_path,
        specrouter__top="from specrouter.room.a import x\n",
        specrouter__room__a="import specrouter.room.b\n",
        specrouter__room__b="def f():\n    from specrouter import low\n",
        specrouter__low="import statemgr.store\nimport os\n",
        statemgr__store="",
        statemgr__other="import statemgr.store\n",
    )
    assert structure.floors(found) == (
        "specrouter/top", "specrouter/room", "specrouter/low", "statemgr",
    )  # fmt: skip
    assert structure.rooms(found) == ["low", "room", "top"]


def test_self_and_cls_are_no_parameters_and_starred_ones_are(tmp_path: Path) -> None:
    text = "class A:\n    def f(self, a, /, b, *c, d, e, **g): ...\n    def h(self, *, a, b): ...\n"
    assert structure.wide_functions(sources(tmp_path, statemgr__a=text)) == []
    kernel = "@triton.jit\ndef k(a, b, c, d, e, f, g): ...\n"
    assert structure.wide_functions(sources(tmp_path, statemgr__a=kernel)) == []
    wider = text.replace("a, /", "a, i, /")
    assert structure.wide_functions(sources(tmp_path, statemgr__a=wider)) == ["statemgr/a.py:f (7)"]


def test_a_function_is_as_long_as_its_lines(tmp_path: Path) -> None:
    forty = "def f():\n" + "    pass\n" * 39
    assert structure.long_functions(sources(tmp_path, statemgr__a=forty)) == []
    more = forty + "    pass\n"
    assert structure.long_functions(sources(tmp_path, statemgr__a=more)) == ["statemgr/a.py:f (41)"]


def test_statements_of_a_step_are_counted_with_those_it_hands_on_to(tmp_path: Path) -> None:
    text = (
        "class Engine:\n"
        '    def step(self):\n        """Says."""\n'
        "        with self.lock:\n            self._step()\n"
        "    def _step(self):\n        if self.a:\n            return\n        self.b()\n"
        "    def b(self):\n        pass\n"
    )
    assert structure.step_statements(sources(tmp_path, specrouter__engine__engine=text)) == 5


CONSTANTS = '''"""A docstring
of two lines."""

# a comment
ONE = 1  # and another
MANY = ((1, 2.5), -3, "four", True)
TEXT = "of no number"


class A:
    """Of a class."""

    default = 4


def f(x=5):
    return """no
    docstring"""
'''


def test_code_that_decides_is_counted(tmp_path: Path) -> None:
    found = decision_code.measure(sources(tmp_path, specrouter__slo__a=CONSTANTS))
    assert found == decision_code.DecisionCode(17, 8, 4, 2, 1)


def test_a_file_with_code_needs_a_test_at_its_place(tmp_path: Path) -> None:
    long = "x = 1\n" * structure.WORTH_A_TEST
    found = sources(tmp_path, statemgr__a=long, statemgr__b=long[6:], processors__verify=long)
    assert structure.untested_files(found) == ["processors/verify.py", "statemgr/a.py"]
    (tmp_path / "tests" / "statemgr").mkdir(parents=True)
    (tmp_path / "tests" / "statemgr" / "test_a.py").touch()
    assert structure.untested_files(found) == ["processors/verify.py"]


def test_a_measure_is_reached_at_its_goal() -> None:
    assert [Measure("m", 9, now, 5).verdict for now in (5, 6, None)] == [
        "reached", "above", "not measured",
    ]  # fmt: skip
    lines = lines_of([Measure("m", 9, 6, 5, reason="a reason")])
    assert lines[1].split() == ["m", "9", "6", "5", "above"]
    assert lines[-1] == "  m: a reason"


def test_a_module_is_named_as_it_is_imported() -> None:
    names = [Source(Path(path), "").module for path in ("a/b.py", "a/__init__.py")]
    assert names == ["a.b", "a"]
