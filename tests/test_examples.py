"""The examples that people start with run, on the bundled family."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jsonschema
import nbclient
import nbformat
import pytest

from examples import decision_plot, objectives, structured_output
from specrouter.cycle import DraftShape, Option
from specrouter.routing.decision_record import DecisionRecord
from specrouter.view import ChainDecision

ROOT = Path(__file__).resolve().parent.parent


def test_two_classes_of_requests_are_judged_apart(capsys: pytest.CaptureFixture[str]) -> None:
    objectives.main(["--requests", "4", "--new-tokens", "6"])
    *classes, goodput = capsys.readouterr().out.splitlines()
    assert {line.split()[0] for line in classes} == {"interactive", "batch"}
    assert all("of 2 attained" in line for line in classes)
    assert goodput.startswith("goodput")


def test_structured_answers_are_of_the_schema(capsys: pytest.CaptureFixture[str]) -> None:
    structured_output.main(["--seeds", "2"])
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in lines] == ["seed 0", "seed 1"]
    for line in lines:
        answer = json.loads(line.partition(": ")[2].rpartition("  (")[0])
        jsonschema.validate(answer, structured_output.SCHEMA)


def option(chain: tuple[str, ...], ms_per_token: float) -> Option:
    return Option(chain=chain, shape=DraftShape(2, 1), ms_per_token=ms_per_token)


def record(*alternatives: Option) -> DecisionRecord:
    decision: Any = SimpleNamespace(
        chain=("a", "b"), predicted=option(("a", "b"), 3.0), alternatives=alternatives
    )
    checked: ChainDecision = decision
    return DecisionRecord(cycle=7, unix_s=0.0, requests=1, decision=checked)


def test_a_plot_has_the_fastest_shape_of_each_chain(tmp_path: Path) -> None:
    seen = record(option(("b",), 9.0), option(("a", "b"), 4.0), option(("c", "b"), 6.0))
    best = decision_plot.best_of_each_chain(seen)
    assert [(one.chain, one.ms_per_token) for one in best] == [
        (("a", "b"), 3.0),
        (("c", "b"), 6.0),
        (("b",), 9.0),
    ]
    decision_plot.draw(seen, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.long
def test_the_notebook_runs() -> None:
    """With a bundled model in the place of the one that is fetched."""
    text = (ROOT / "examples" / "notebook.ipynb").read_text().replace("smollm2", "tiny-3m")
    notebook = nbformat.reads(text, as_version=4)
    nbclient.NotebookClient(notebook, timeout=300, resources={"metadata": {"path": ROOT}}).execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    shown = [output["data"] for output in outputs if output.output_type == "execute_result"]
    pages = [data["text/html"] for data in shown if "text/html" in data]
    assert len(pages) == 5
    assert "<pre>equal, " in pages[2]
    assert 'title="tiny-1m, cycle' in pages[3]
    assert shown[0]["text/plain"] == "LLM('tiny-3m', drafted for by ngram)"
