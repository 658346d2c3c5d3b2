"""`python -m research load` as a whole: a fake router, and the bundled pool."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from research.__main__ import main
from research.bench.load_bench import LoadBench
from research.bench.load_requests import Point, sweep
from research.bench.load_table import load_table
from research.bench.options import DEFAULT_POLICIES, LoadOptions
from research.bench.policy_service import PolicyService
from research.bench.traces import Arrival
from research.named_policies import LIVE, POLICIES, NamedPolicy
from research.tests.bench.test_traces import ADASERVE, letters
from specrouter import RequestError, RequestOutput
from specrouter.bench.contenders import MeasurementError
from specrouter.cli.arguments import default_config
from specrouter.config import RouterConfig, SchedulerConfig, TreesConfig
from specrouter.config.policies import ADMISSION_POLICIES, NODE_SELECTIONS
from specrouter.progress import Progress
from specrouter.request.objective import SLO
from specrouter.request.params import SamplingParams
from specrouter.slo.tree_planner import selection_of
from tests.request_outputs import request_output

TINY = str(default_config())
BASELINE_MS = 20.0
TPOT_MS = {"smallest": 25.0, "target-only": 30.0, "adaptive": 10.0}


def bench(*options: str) -> int:
    return main(["load", "--config", TINY, *options])


class FakeHandle:
    is_done = True

    def __init__(self, output: RequestOutput) -> None:
        self._output = output

    def cancel(self) -> None:
        raise AssertionError("all have ended")

    def result(self, timeout: float | None = None) -> RequestOutput:
        return self._output


class FakeRouter:
    """Every token takes what the policy's do; requests alone on the target take the baseline."""

    def __init__(self, error: str | None = None, trees: dict[str, Any] | None = None) -> None:
        self.config = RouterConfig.load(TINY)
        if trees is not None:
            self.config = self.config.model_copy(update={"trees": TreesConfig(**trees)})
        self.policy = ""
        self.used: list[tuple[str, dict[str, Any], bool]] = []
        self.calls: list[tuple[SamplingParams, Any, SLO | None]] = []
        self._error = error

    def set_policy(self, policy: str, **settings: Any) -> None:
        self.policy = policy
        self._settings = settings

    @property
    def instruments(self) -> FakeRouter:
        return self

    def set_learning(self, is_learning: bool) -> None:
        self.used.append((self.policy, self._settings, is_learning))

    def submit(
        self,
        prompt: Any,
        params: SamplingParams | None = None,
        speculation: Any = None,
        *,
        slo: SLO | None = None,
    ) -> FakeHandle:
        assert params is not None
        if params.max_new_tokens > 100:
            raise RequestError("max_new_tokens", "too many")
        self.calls.append((params, speculation, slo))
        tpot_ms = BASELINE_MS if speculation == "off" else TPOT_MS[self.policy]
        count = params.max_new_tokens
        timed = {"ttft_ms": 5.0, "tpot_ms": tpot_ms, "acceptance_length": 2.0}
        return FakeHandle(request_output([1] * count, timed, self._error))


def load_bench(router: Any, **options: Any) -> LoadBench:
    asked = LoadOptions(config=Path("x.yaml"), poisson=1.0, **options)
    texts = {"code": ["abc"]}
    return LoadBench(PolicyService(router), letters, texts, asked, Progress(stream=io.StringIO()))


def point(output_tokens: int = 8) -> Point:
    arrivals = [
        Arrival(at / 1000, "coding", 4, output_tokens, ratio)
        for at, ratio in enumerate((1.2, 1.2, None, 2.0))
    ]
    return Point(1.0, tuple(arrivals))


def test_objectives_are_ratios_times_the_measured_baseline() -> None:
    router = FakeRouter()
    found = load_bench(router, policy=("target-only", "goodput")).run([point()])
    asked = [slo and slo.tpot_ms for _, _, slo in router.calls[-4:]]
    assert asked == pytest.approx([24.0, 24.0, None, 40.0])
    rows = found["points"][0]["policies"]
    assert rows["target-only"]["violations"] == 2  # 30 ms are too slow for 24, and fast for 40
    assert rows["goodput"]["attainment"] == 1.0
    assert found["points"][0]["requests_per_s"] == pytest.approx(1000.0)


def test_an_end_to_end_objective_is_asked_of_every_request_and_judged() -> None:
    """8 tokens take 5 + 7 * 30 ms with the target alone, and 5 + 7 * 10 ms with drafts."""
    router = FakeRouter()
    bench = load_bench(router, policy=("target-only", "goodput"), e2e_ms=100.0)
    rows = bench.run([point()])["points"][0]["policies"]
    assert {slo and slo.e2e_ms for _, _, slo in router.calls[-4:]} == {100.0}
    assert router.calls[0][2] is None  # the baseline has no objectives
    assert (rows["target-only"]["violations"], rows["goodput"]["violations"]) == (4, 0)
    assert rows["goodput"]["e2e_ms"]["p95"] == pytest.approx(75.0)
    assert rows["goodput"]["over"]["eaf_tpot"] == pytest.approx(3.0)


def test_baseline_is_measured_alone_on_the_target_before_the_runs() -> None:
    router = FakeRouter()
    bench = load_bench(router, policy=("goodput",))
    bench.run([point()])
    assert bench.alone is not None
    assert bench.alone.tpot_ms == BASELINE_MS
    alone = [at for at, (_, speculation, _) in enumerate(router.calls) if speculation == "off"]
    assert len(alone) == 4
    assert all(slo is None for _, _, slo in router.calls[: alone[-1] + 1])  # settling included
    assert any(slo is not None for _, _, slo in router.calls[alone[-1] + 1 :])
    assert [used for used, _, _ in router.used][-2:] == ["target-only", "adaptive"]


def test_drafters_are_tried_before_anything_counts() -> None:
    router = FakeRouter()
    load_bench(router, policy=("target-only", "spec-4", "goodput")).run([point()])
    baseline = [used for used, _, _ in router.used].index("target-only")
    settled = [settings for _, settings, _ in router.used[:baseline]]
    assert any(settings.get("depth") == 4 for settings in settled)
    assert any(settings["trees"]["selection"] == "goodput" for settings in settled)
    quiet = FakeRouter()
    load_bench(quiet, policy=("target-only",)).run([point()])
    assert {used for used, _, _ in quiet.used} == {"target-only"}


def test_every_policy_gets_the_same_requests_in_an_order_that_rotates() -> None:
    router = FakeRouter()
    load_bench(router, policy=("target-only", "goodput"), rounds=2).run([point()])
    turns = ["target-only", "adaptive", "adaptive", "target-only"]
    assert [used for used, _, _ in router.used[-4:]] == turns
    counted = [(replace(one, cache_salt=None), *rest) for one, *rest in router.calls[-32:]]
    runs = [counted[8 * i + 4 : 8 * i + 8] for i in range(4)]  # 4 warm up
    assert runs[0] == runs[1] != runs[2] == runs[3]
    assert len({params.seed for run in runs[1:3] for params, *_ in run}) == 8


def test_no_run_quotes_what_another_one_or_its_warm_up_has_said() -> None:
    router = FakeRouter()
    load_bench(router, policy=("target-only", "goodput"), rounds=2).run([point()])
    tenants = [params.cache_salt for params, _, _ in router.calls[-32:]]
    assert len({tenants[at] for at in range(0, 32, 4)} - {None}) == 8
    assert all(len(set(tenants[at : at + 4])) == 1 for at in range(0, 32, 4))


def test_requests_that_are_refused_are_counted_and_none_is_lost() -> None:
    router = FakeRouter()
    requests = [point(8).arrivals[0], point(101).arrivals[1]]
    found = load_bench(router, policy=("goodput",)).run([Point(1.0, tuple(requests))])
    row = found["points"][0]["policies"]["goodput"]
    assert (row["requests"], row["errors"], row["violations"]) == (2, 1, 1)


def test_failed_baseline_is_a_failed_measurement() -> None:
    with pytest.raises(MeasurementError, match=r"baseline: broken"):
        load_bench(FakeRouter(error="broken"), policy=("goodput",)).run([point()])


def test_the_baseline_has_a_time_per_token_where_outputs_have_one() -> None:
    router = FakeRouter()
    load_bench(router, policy=("goodput",)).measure_baseline(point(output_tokens=1))
    assert {params.max_new_tokens for params, _, _ in router.calls} == {2}


def test_every_policy_is_one_that_the_scheduler_knows() -> None:
    for policy in map(POLICIES.get, LIVE):
        assert policy is not None
        TreesConfig(selection=policy.selection)
        SchedulerConfig.model_validate({"policy": policy.chains, **policy.settings})
        ADMISSION_POLICIES.find(policy.admission)
    assert set(DEFAULT_POLICIES) <= set(LIVE)


@pytest.mark.parametrize("name", LIVE)
def test_a_policy_says_which_selection_it_means_and_the_scenario_the_rest(name: str) -> None:
    router: Any = FakeRouter(trees={"selection": "whole", "budget_tokens": 24})
    PolicyService(router).use(name)
    used, settings, learns = router.used[-1]
    chosen = POLICIES[name]
    assert used == chosen.chains
    assert settings["trees"] == {"selection": chosen.selection, "budget_tokens": 24}
    assert settings["admission"] == chosen.admission
    assert learns == (chosen.chains != "target-only"), "nothing is learned without drafters"


def test_the_default_policy_is_what_a_scenario_without_trees_has() -> None:
    default = selection_of(TreesConfig(), SchedulerConfig())
    for name in ("goodput", "slo"):
        assert NODE_SELECTIONS.find(POLICIES[name].selection) is default
    config = RouterConfig.load(TINY)
    assert POLICIES["slo"] == NamedPolicy(
        chains=config.scheduler.policy, selection="goodput", admission=config.engine.admission
    )


def test_sweep_has_a_point_for_each_scale() -> None:
    options = LoadOptions(config=Path("x"), poisson=1.0, scale=(1, 2))
    trace = [Arrival(float(at), "chat", 8, 8, 1.5) for at in range(8)]
    points = sweep(trace, options, limit=100)
    assert [(one.scale, one.arrivals[-1].at_s) for one in points] == [(1, 7), (2, 14)]


# Output


def document() -> dict[str, Any]:
    router = FakeRouter()
    points = [Point(scale, point().arrivals) for scale in (1.0, 2.0)]
    found = load_bench(router, policy=("target-only", "goodput")).run(points)
    conditions = {"machine": "x", "baseline_ms": 20.0}
    return {"conditions": conditions, **found}


def test_the_table_has_every_policy_at_every_scale() -> None:
    lines = load_table(document()).splitlines()
    [row] = [line.split() for line in lines if line.startswith("goodput")][:1]
    assert row[1:3] == ["100%", "0"]
    assert lines[4].split()[-8:] == [
        "violations",
        "x",
        "goodput",
        "x",
        "ttft_p99",
        "x",
        "eaf_tpot",
        "x",
    ]
    assert row[-1] == "3.00"
    assert "scale 2: 1000.00 requests/s" in lines
    assert lines[1] == "baseline latency 20.00 ms"


def test_three_requests_on_the_bundled_pool(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text(ADASERVE)
    options = ["--trace", str(trace), "--scale", "0.01", "--requests=3", "--output-tokens=4"]
    files = [f"--json={tmp_path / 'load.json'}"]
    policies = ["--policy", "goodput", "--rows=2"]
    assert bench(*options, *policies, *files) == 0
    out, err = capsys.readouterr()
    document = json.loads((tmp_path / "load.json").read_text())
    assert "{" not in out
    assert err.splitlines()[-1] == f"wrote {tmp_path}/load.json"
    assert document["conditions"]["baseline_ms"] > 0
    assert document["conditions"]["rows"] == 2
    row = document["points"][0]["policies"]["goodput"]
    assert (row["requests"], row["errors"]) == (3, 0)
    assert row["tokens_per_s"] * row["duration_s"] == pytest.approx(12)
    assert "round 1: goodput: " in err
