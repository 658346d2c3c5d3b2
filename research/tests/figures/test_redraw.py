"""Figures of the papers: cells, sweeps that go on where they were, capacities, pictures."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from modelpool.errors import ConfigError
from research.__main__ import main
from research.figures import sweep
from research.figures.catalog import FIGURES
from research.figures.cell import Cell, capacity, in_system, outcomes_of, run_cell
from research.figures.cluster_cell import ClusterKind
from research.figures.command import CELLS, FigureOptions, draw_figures
from research.figures.figure import Scope, rows_of
from research.named_policies import POLICIES
from research.sim.scenarios import SCENARIOS

pytestmark = pytest.mark.slow
LLAMA = Cell(machine="adaserve-llama70b", workload="adaserve", policy="vllm", rate=4.4, requests=12)
CODER = Cell(
    machine="slos-serve-opt-6.7b",
    workload="Coder",
    policy="slo",
    rate=2.0,
    requests=12,
    acceptance=0.7,
)


ROUTED = replace(CODER, replicas=2, routing="slo")


def test_a_key_names_all_that_a_result_depends_on() -> None:
    changed = [
        replace(LLAMA, policy="slo"),
        replace(LLAMA, rate=4.0),
        replace(LLAMA, seed=1),
        replace(LLAMA, urgent_ratio=0.6),
        replace(LLAMA, traces="somewhere"),
    ]
    assert len({one.key for one in [LLAMA, *changed]}) == 6
    assert replace(LLAMA, traces="elsewhere").key == changed[-1].key
    kinds = [ROUTED, replace(ROUTED, routing="p2c"), replace(ROUTED, cluster=ClusterKind(slow=2.0))]
    assert len({one.key for one in kinds}) == 3
    assert "routing" not in LLAMA.key, "as it was before there were clusters"


def test_routing_is_told_beside_what_was_attained() -> None:
    found = run_cell(replace(ROUTED, measure="routing"))
    assert found["attained"] == run_cell(ROUTED)["attained"]
    assert (found["moves"], found["lost"]) == (0, 0)
    assert 1.0 <= found["crowding"] <= 2.0
    assert found["state_age_p99_s"] <= 0.6


def test_failures_move_requests_and_lose_none() -> None:
    kind = ClusterKind(mean_up_s=3.0)
    found = run_cell(replace(ROUTED, measure="routing", replicas=3, requests=24, cluster=kind))
    assert found["moves"] > 0
    assert found["lost"] == 0


def test_a_pair_is_a_replica_whose_halves_are_two_machines() -> None:
    kind = ClusterKind(kv_ms_per_token=0.01)
    pairs, whole = replace(ROUTED, measure="routing", cluster=kind), ROUTED
    assert run_cell(pairs)["attained"] >= run_cell(whole)["attained"]


def test_overload_is_four_times_the_rate() -> None:
    kind = ClusterKind(max_waiting=64, rejects=True)
    found = run_cell(replace(ROUTED, measure="overload", rate=6.0, requests=40, cluster=kind))
    assert found["refused"] > 0
    assert found["goodput_ratio"] > 1.0, "more come, and 6 a second was no capacity"


@pytest.mark.parametrize("limit", [0.03, 0.7, 1.0, 5.3, 40.0])
def test_capacity_is_found_to_two_percent(limit: float) -> None:
    found = capacity(lambda rate: float(rate <= limit), 1.0, 0.9)
    assert limit / 1.02 <= found <= limit


def test_nothing_is_attained_at_any_rate() -> None:
    assert capacity(lambda rate: 0.5, 1.0, 0.9) == 0.0


def test_a_capacity_is_a_rate_at_which_enough_is_attained() -> None:
    cell = replace(CODER, measure="capacity", requests=24, policy="sarathi")
    found = run_cell(cell)
    tried = dict(found["tried"])
    assert tried[found["capacity"]] >= 0.9
    above = [rate for rate in tried if rate > found["capacity"]]
    assert tried[min(above)] < 0.9
    assert min(above) <= 1.02 * found["capacity"]


def test_requests_in_the_system_are_counted() -> None:
    outcomes = outcomes_of(LLAMA, 4.4)
    found = in_system(outcomes, 1000)
    area_s = sum(found["attained"]) + sum(found["others"])
    area_s *= max(one.end_s for one in outcomes) / 1000
    assert area_s == pytest.approx(sum(one.end_s - one.sent_s for one in outcomes), rel=0.02)


def test_sarathi_has_the_largest_batch_within_the_tightest_tpot() -> None:
    """366 tokens on OPT-6.7B at 50 ms."""
    busy = replace(CODER, policy="sarathi", rate=30.0, requests=40)
    tokens_ms = 0.06878 * 366 + 24.80
    assert tokens_ms <= SCENARIOS["Coder"].tightest_tpot_ms
    worst = [one.answer.worst_run_ms for one in outcomes_of(busy, 30.0)]
    assert max(one for one in worst if one is not None) <= 50.0 * (1.0 + 1e-9)


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> list[Cell]:
    ran: list[Cell] = []

    def run(cell: Cell) -> dict[str, float]:
        ran.append(cell)
        if cell.policy == "specinfer":
            raise KeyboardInterrupt
        return {"attained": cell.rate}

    monkeypatch.setattr(sweep, "run_cell", run)
    return ran


def test_a_sweep_that_was_stopped_goes_on_where_it_was(tmp_path: Path, counted: list[Cell]) -> None:
    file = tmp_path / CELLS
    cells = [replace(LLAMA, rate=rate) for rate in (1.0, 2.0)]
    stops = replace(LLAMA, policy="specinfer")
    with pytest.raises(KeyboardInterrupt):
        sweep.run_sweep([cells[0], stops, cells[1]], file, 1)
    with file.open("a") as lines:
        lines.write('{"key": "half of a li')
    assert [one.rate for one in counted] == [1.0, 4.4]
    found = sweep.run_sweep(cells, file, 1)
    assert counted[2:] == [cells[1]], "and only what was left"
    assert found == {cells[0].key: {"attained": 1.0}, cells[1].key: {"attained": 2.0}}
    assert sweep.run_sweep(cells, file, 1) == found
    assert len(counted) == 3


def test_the_same_cell_of_two_figures_runs_once(tmp_path: Path, counted: list[Cell]) -> None:
    sweep.run_sweep([LLAMA, LLAMA], tmp_path / CELLS, 1)
    assert counted == [LLAMA]


@pytest.mark.long
def test_several_processes_find_the_same(tmp_path: Path) -> None:
    cells = [LLAMA, replace(LLAMA, policy="sarathi")]
    alone = sweep.run_sweep(cells, tmp_path / "one.jsonl", 1)
    assert sweep.run_sweep(cells, tmp_path / "two.jsonl", 2) == alone


@pytest.mark.parametrize("figure", FIGURES.values(), ids=list(FIGURES))
def test_every_figure_has_cells_that_can_be_run_and_says_what_is_known(figure: object) -> None:
    assert isinstance(figure, type(FIGURES["slos-serve-3"]))
    for quick in (False, True):
        cells = figure.cells(Scope(quick))
        assert cells
        assert {cell.policy for cell in cells} <= {*POLICIES, "two-level", "three-level", "paths"}
        assert len({cell.key for cell in cells}) == len(cells)
    assert len(figure.cells(Scope(True))) <= 24
    assert all(hasattr(cell, figure.axis.line) for cell in figure.cells(Scope(True)))
    assert figure.published
    assert figure.assumed


def test_seeds_are_averaged_and_kept() -> None:
    figure = FIGURES["adaserve-8-9"]
    cells = [replace(LLAMA, seed=seed) for seed in (0, 1)]
    results = {
        cell.key: {"attained": 0.5 + 0.2 * cell.seed, "goodput_tokens_per_s": 10.0}
        for cell in cells
    }
    [row] = rows_of(figure, cells, results)
    assert row["attained"] == pytest.approx(0.6)
    assert row["attained_of_seeds"] == [0.5, 0.7]


def test_figure_3_comes_out_as_published(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    draw_figures(FigureOptions(names=("slos-serve-3",), out=tmp_path))
    document = json.loads((tmp_path / "slos-serve-3.json").read_text())
    found = {row["policy"]: (row["new"], row["old"]) for row in document["rows"]}
    assert found["vllm"][1] == 0.0, "prefill first breaks every TPOT"
    assert found["sarathi"] == (2.0, 3.0), "two of four first tokens are late"
    assert found["slos-serve"] == (3.0, 3.0)
    assert found["slo"][1] == 3.0, "it keeps the means of those that run, and a margin"
    assert (tmp_path / "slos-serve-3.png").read_bytes().startswith(b"\x89PNG")
    assert "Published: prefill first" in capsys.readouterr().out


def test_selection_is_a_small_part_of_a_cycle(tmp_path: Path) -> None:
    draw_figures(FigureOptions(names=("adaserve-15",), out=tmp_path, quick=True))
    [row] = json.loads((tmp_path / "adaserve-15.json").read_text())["rows"]
    assert row["drafting"] + row["selection"] + row["verification"] == pytest.approx(1.0)
    assert 0.0 < row["selection"] < 0.1


@pytest.mark.long
def test_the_static_rows_of_table_2_are_near_what_they_were_fitted_to(tmp_path: Path) -> None:
    """Two batches at which the published rows are smooth."""
    where = ("requests=8,16", "policy=two-level,three-level")
    draw_figures(FigureOptions(names=("specrouter-table-2",), out=tmp_path, seeds=2, where=where))
    rows = json.loads((tmp_path / "specrouter-table-2.json").read_text())["rows"]
    found = {(row["policy"], row["x"]): row["speed_up"] for row in rows}
    published = {"two-level": {8: 1.38, 16: 1.31}, "three-level": {8: 1.33, 16: 1.20}}
    for policy, by_batch in published.items():
        for batch, value in by_batch.items():
            assert found[policy, batch] == pytest.approx(value, rel=0.15)


def test_the_command_draws_a_sweep(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["figures", "adaserve-16", "--quick", "--out", str(tmp_path)]
    asked += ["--where", "policy=adaserve,slo"]
    assert main(asked) == 0
    assert "AdaServe figure 16" in capsys.readouterr().out
    document = json.loads((tmp_path / "adaserve-16.json").read_text())
    assert [row["policy"] for row in document["rows"]] == ["adaserve", "slo"]
    assert document["arrivals"] == "drawn"
    assert len((tmp_path / CELLS).read_text().splitlines()) == 2


@pytest.mark.parametrize(
    ("given", "argument"),
    [
        ({"names": ("adaserve-7",)}, "NAME"),
        ({"seeds": 0}, "--seeds"),
        ({"requests": 1}, "--requests"),
        ({"processes": 0}, "--processes"),
        ({"traces": Path("/nowhere")}, "--traces"),
        ({"where": ("colour=red",)}, "--where"),
        ({"where": ("policy",)}, "--where"),
    ],
)
def test_a_bad_argument_is_named(given: dict[str, object], argument: str) -> None:
    with pytest.raises(ConfigError, match=argument):
        FigureOptions(**given)  # type: ignore[arg-type]


def test_restrictions_that_leave_nothing_are_refused(tmp_path: Path) -> None:
    options = FigureOptions(
        names=("adaserve-16",), out=tmp_path, quick=True, where=("policy=vllm",)
    )
    with pytest.raises(ConfigError, match="leaves nothing of adaserve-16"):
        draw_figures(options)


def test_help_names_every_figure_and_imports_nothing_slow() -> None:
    script = (
        "import sys\n"
        "from research.__main__ import main\n"
        "try:\n    main(['figures', '--help'])\n"
        "except SystemExit:\n    pass\n"
        "assert not {'numpy', 'torch', 'matplotlib'} & set(sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    shown = "".join(done.stdout.split())
    assert [name for name in FIGURES if name not in shown] == []
