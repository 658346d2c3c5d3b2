"""The page of supported models says what the checks found, and shapes are the released ones."""

import json
from pathlib import Path

import pytest

from checks.exact.named_families import NAMED
from checks.exact.supported import CHECKS, PUBLISHED, main, memory, page

PAGE = Path(__file__).parents[2] / "docs" / "models.md"


def names_in(text: str) -> list[str]:
    rows = [line for line in text.splitlines() if line.startswith("| ")]
    return [row.split("|")[1].strip() for row in rows[1:]]


def test_the_page_has_families_that_the_checks_serve() -> None:
    names = names_in(PAGE.read_text(encoding="utf-8"))
    exact = [family.name for family in NAMED if family.expected == "exact"]
    assert len(names) > 60
    assert names == [name for name in exact if name in names]
    assert set(PUBLISHED) <= set(names)


def test_only_what_passed_every_check_has_a_row(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = (
        {"name": "gpt-2", "status": "exact", "checks": CHECKS},
        {"name": "opt 1.3b", "status": "exact", "checks": 2},
        {"name": "pythia", "status": "WRONG", "checks": CHECKS},
    )
    for at, one in enumerate(found):
        (tmp_path / str(at)).write_text(f"a table\n{json.dumps({'families': [one]})}\n")
    assert main([str(tmp_path / str(at)) for at in range(len(found))]) == 0
    printed = capsys.readouterr().out
    assert names_in(printed) == ["gpt-2"]
    assert "| gpt-2 | `GPT2LMHeadModel` | generic | all | GPT-2 | 0.2 | 36 |" in printed


@pytest.mark.exact
def test_the_page_is_what_is_made_of_its_families() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert page(names_in(text)) == text


@pytest.mark.exact
@pytest.mark.parametrize("name", PUBLISHED)
def test_a_released_shape_has_as_many_parameters_as_its_model(name: str) -> None:
    _, billions, config = PUBLISHED[name]
    assert memory(config())[0] / 1e9 == pytest.approx(billions, rel=0.01)
