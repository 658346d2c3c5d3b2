"""`python -m research simulate`: the bench in simulated time, on a pool's measured times too."""

from __future__ import annotations

import io
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from research.__main__ import main
from research.bench.load_bench import LoadBench
from research.bench.load_requests import Point
from research.bench.policy_service import PolicyService
from research.bench.traces import poisson
from research.simulate import SimulateOptions, simulated_machine
from research.tests.bench.test_load_bench import TINY, FakeRouter, point
from research.tests.bench.test_traces import letters
from research.tests.sim.test_service import STEP_MS, service
from specrouter.config import RouterConfig
from specrouter.profile.snapshot import PerformanceSnapshot
from specrouter.profile.time_curve import TimeCurve
from specrouter.progress import Progress
from specrouter.request.params import RequestError


def test_the_bench_runs_on_a_simulation_and_its_clock() -> None:
    names = ("target-only", "goodput")
    options = SimulateOptions(
        config=Path("x.yaml"), poisson=4.0, acceptance=0.7, policy=names, requests=10
    )
    simulated = service()
    bench = LoadBench(
        simulated, lambda text: list(text.encode()), {"a": ["abc"]}, options,
        Progress(stream=io.StringIO()), simulated,
    )  # fmt: skip
    [found] = bench.run([Point(1.0, tuple(poisson(4.0, 10, 30.0, 0)))])["points"]
    assert bench.alone is not None
    assert bench.alone.tpot_ms == pytest.approx(STEP_MS)
    assert set(found["policies"]) == set(names)


@pytest.mark.parametrize("acceptance", ["0", "0.34", "0.96", "nan", "-1"])
def test_an_acceptance_that_no_text_has_is_refused(
    acceptance: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["simulate", "--poisson", "1", "--acceptance", acceptance]) == 2
    assert "--acceptance: must be from 0.35 to 0.95" in capsys.readouterr().err


@pytest.mark.long
def test_the_command_simulates_with_the_measured_times_of_a_pool(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "found.json"
    asked = ["simulate", "--config", "tiny", "--poisson", "20", "--requests", "12"]
    asked += ["--policy", "target-only", "goodput", "--acceptance", "0.7", "--json", str(file)]
    assert main(asked) == 0
    assert "SIMULATED, a best token accepted in 0.70 of cases" in capsys.readouterr().out
    found = json.loads(file.read_text())
    assert found["conditions"]["simulated_acceptance"] == 0.7
    assert found["points"][0]["policies"]["goodput"]["errors"] == 0


def test_a_simulation_of_this_machine_takes_what_serving_has_taught() -> None:
    """Forwards, and the engine's own work around them, on the machine as slow as it is."""
    known = PerformanceSnapshot(
        times={
            name: TimeCurve(((1, ms), (64, 2 * ms)))
            for name, ms in {"small": 1.0, "big": 10.0}.items()
        },
        parameters={"small": 1, "big": 100},
        stages={"cycle": TimeCurve(((1, 2.0),))},
        machine=1.5,
    )
    pool = SimpleNamespace(target="big", names=("small", "big"), models=("small", "big"))
    config = RouterConfig.load(TINY)
    instruments = SimpleNamespace(performance=lambda: known)
    router: Any = SimpleNamespace(pool=pool, config=config, instruments=instruments)
    machine = simulated_machine(router)
    assert machine.names == ("small", "big")
    assert [machine.times[name].at(1) for name in machine.names] == [1.5, 15.0]
    assert machine.stages["cycle"].at(1) == 3.0


@pytest.mark.parametrize(
    ("asked", "admission"), [(("vllm", "goodput"), "fcfs"), (("vllm", "sarathi"), "slo")]
)
def test_models_are_timed_live_before_they_are_simulated(
    asked: tuple[str, ...], admission: str
) -> None:
    """With the policies that an engine can run; with the default where there are none."""
    router: Any = FakeRouter()
    options = SimulateOptions(config=Path("x.yaml"), poisson=1.0, policy=asked)
    progress = Progress(stream=io.StringIO())
    bench = LoadBench(PolicyService(router), letters, {"code": ["abc"]}, options, progress)
    bench.settle(point())
    assert router.calls
    assert {one["admission"] for _, one, _ in router.used} == {admission}


@pytest.mark.parametrize(
    ("error", "code"), [(KeyboardInterrupt(), 130), (RequestError("tpot_ms", "is no number"), 2)]
)
def test_a_command_that_is_stopped_or_refused_ends_without_a_traceback(
    error: BaseException,
    code: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def draw(_: object) -> None:
        raise error

    monkeypatch.setattr("research.figures.command.draw_figures", draw)
    assert main(["figures"]) == code
    assert len(capsys.readouterr().err.splitlines()) == (code == 2)
