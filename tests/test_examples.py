"""The examples that people start with run, on the bundled family."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jsonschema
import nbclient
import nbformat
import pytest

from examples import decision_plot, objectives, openai_client, structured_output
from modelpool.fast.cpu import int8_refusal
from specrouter.cycle import DraftShape, Option
from specrouter.routing.decision_record import DecisionRecord
from specrouter.view import ChainDecision

ROOT = Path(__file__).resolve().parent.parent
needs_int8 = pytest.mark.skipif(int8_refusal() is not None, reason=str(int8_refusal()))


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


def test_the_openai_example_says_how_to_install_its_package(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "openai", None)
    assert openai_client.main([]) == 1
    assert "pip install openai" in capsys.readouterr().err


class _Unreachable:
    """The `openai` package where nobody listens."""

    class APIConnectionError(Exception):
        pass

    class APIStatusError(Exception):
        pass

    def OpenAI(self, **_: Any) -> Any:
        def refused() -> None:
            raise self.APIConnectionError("connection refused")

        return SimpleNamespace(models=SimpleNamespace(list=refused))


def test_the_openai_example_says_in_one_line_that_no_service_listens(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "openai", _Unreachable())
    assert openai_client.main(["--url", "http://127.0.0.1:9"]) == 1
    said = capsys.readouterr()
    assert said.err == "no service at http://127.0.0.1:9: start one with `make serve`\n"
    assert said.out == ""


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
    notebook = nbformat.read(ROOT / "examples" / "notebook.ipynb", as_version=4)
    nbclient.NotebookClient(notebook, timeout=300, resources={"metadata": {"path": ROOT}}).execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    shown = [output["data"] for output in outputs if output.output_type == "execute_result"]
    pages = [data["text/html"] for data in shown if "text/html" in data]
    assert len(pages) == 4
    assert 'title="tiny-1m, cycle' in pages[0]
    assert "equal, with speculation" in pages[1]
    assert shown[0]["text/plain"] == "LLM('tiny-8m', drafted for by tiny-1m, tiny-3m)"
