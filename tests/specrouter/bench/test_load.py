"""`specrouter bench load` as a whole: a fake router, the bundled pool, and what is refused."""

from __future__ import annotations

import importlib.util
import io
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest

from modelpool.errors import ConfigError
from specrouter import RequestError, RequestOutput
from specrouter.bench.load import write_load
from specrouter.bench.load_bench import LoadBench
from specrouter.bench.load_requests import Point, read_arrivals, sweep
from specrouter.bench.load_services import OwnService, ServerService
from specrouter.bench.named_policies import POLICIES, NamedPolicy
from specrouter.bench.options import DEFAULT_POLICIES, LoadOptions
from specrouter.bench.plots import running_over_time, write_load_plots
from specrouter.bench.sample import MeasurementError
from specrouter.bench.tables import load_table
from specrouter.bench.traces import DATASETS, Arrival
from specrouter.cli.arguments import default_config
from specrouter.cli.main import main
from specrouter.config import RouterConfig, SchedulerConfig, TreesConfig
from specrouter.config.policies import ADMISSION_POLICIES, NODE_SELECTIONS
from specrouter.http import keys
from specrouter.http_client import SERVICE_VARIABLE
from specrouter.progress import Progress
from specrouter.request.objective import SLO
from specrouter.request.params import SamplingParams
from specrouter.slo.tree_planner import selection_of
from tests.json_server import JsonHandler, serving
from tests.load_requests import load_request
from tests.request_outputs import request_output
from tests.specrouter.bench.test_traces import ADASERVE, letters

TINY = str(default_config())
BASELINE_MS = 20.0
TPOT_MS = {"smallest": 25.0, "target-only": 30.0, "adaptive": 10.0}


def bench(*options: str) -> int:
    return main(["bench", "load", "--config", TINY, *options])


def bench_server(url: str, *options: str) -> int:
    return main(["bench", "load", f"--server={url}", *options])


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
    return LoadBench(OwnService(router), letters, texts, asked, Progress(stream=io.StringIO()))


def point(output_tokens: int = 8) -> Point:
    arrivals = [
        Arrival(at / 1000, "coding", 4, output_tokens, ratio)
        for at, ratio in enumerate((1.2, 1.2, None, 2.0))
    ]
    return Point(1.0, 0.5, 1.0, tuple(arrivals))


def test_objectives_are_ratios_times_the_measured_baseline() -> None:
    router = FakeRouter()
    found = load_bench(router, policy=("target-only", "goodput")).run([point()])
    asked = [slo and slo.tpot_ms for _, _, slo in router.calls[-4:]]
    assert asked == pytest.approx([24.0, 24.0, None, 40.0])
    rows = found["points"][0]["policies"]
    assert rows["target-only"]["violations"] == 2  # 30 ms are too slow for 24, and fast for 40
    assert rows["goodput"]["attainment"] == 1.0
    assert found["points"][0]["requests_per_s"] == pytest.approx(1000.0)
    over = [request[2] for request in found["series"]["goodput"]]
    assert over == pytest.approx([0.4167, 0.4167, None, 0.25])


def test_an_end_to_end_objective_is_asked_of_every_request_and_judged() -> None:
    """8 tokens take 5 + 7 * 30 ms with the target alone, and 5 + 7 * 10 ms with drafts."""
    router = FakeRouter()
    bench = load_bench(router, policy=("target-only", "goodput"), e2e_ms=50.0)
    both = Point(1.0, 0.5, 2.0, point().arrivals)  # objectives times 2
    rows = bench.run([both])["points"][0]["policies"]
    assert {slo and slo.e2e_ms for _, _, slo in router.calls[-4:]} == {100.0}
    assert router.calls[0][2] is None  # the baseline has no objectives
    assert (rows["target-only"]["violations"], rows["goodput"]["violations"]) == (4, 0)
    assert rows["goodput"]["e2e_ms"]["p95"] == pytest.approx(75.0)
    assert rows["goodput"]["over"]["eaf_tpot"] == pytest.approx(3.0)


def test_poisson_arrivals_have_the_lengths_that_are_asked_for() -> None:
    options = LoadOptions(config=Path("x"), poisson=2.0, requests=60)
    assert {one.category for one in read_arrivals(options)} == {"coding", "chat", "summarization"}
    four = read_arrivals(replace(options, lengths="specrouter"))
    assert {one.category for one in four} == set(DATASETS)
    assert read_arrivals(replace(options, lengths="adaserve")) == read_arrivals(options)


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
    found = load_bench(router, policy=("goodput",)).run([Point(1.0, 1.0, 1.0, tuple(requests))])
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
    for policy in POLICIES.values():
        TreesConfig(selection=policy.selection)
        SchedulerConfig.model_validate({"policy": policy.chains, **policy.settings})
        ADMISSION_POLICIES.find(policy.admission)
    assert set(DEFAULT_POLICIES) <= set(POLICIES)


@pytest.mark.parametrize("name", POLICIES)
def test_a_policy_says_which_selection_it_means_and_the_scenario_the_rest(name: str) -> None:
    router: Any = FakeRouter(trees={"selection": "whole", "budget_tokens": 24})
    OwnService(router).use(name)
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


def test_sweep_has_a_point_for_each_combination() -> None:
    options = LoadOptions(
        config=Path("x"), poisson=1.0, scale=(1, 2), urgent_share=(0.25, 0.5), slo_scale=(1, 3)
    )
    trace = [Arrival(float(i), "coding" if i % 2 else "chat", 8, 8, 1 + i % 2) for i in range(8)]
    points = sweep(trace, options, limit=100)
    settings = [(p.urgent_share, p.slo_scale, p.scale) for p in points]
    assert len(set(settings)) == 8
    assert settings[0] == (0.25, 1, 1)
    for one in points:
        assert one.arrivals[-1].at_s == 7 * one.scale
        assert {a.slo_ratio for a in one.arrivals} == {one.slo_scale, 2 * one.slo_scale}


# A server


class Answers(JsonHandler):
    """Six tokens in two events; refuses an odd seed. Reads letters, and at most 40 of them."""

    seen: ClassVar[list[tuple[dict[str, Any], str | None]]]
    authorized: ClassVar[list[str | None]]
    read: ClassVar[list[str]]
    e2e: ClassVar[list[str | None]]

    def do_GET(self) -> None:
        if self.path == "/health":
            self.answer({"status": "ok"})
        else:
            self.authorized.append(self.headers["Authorization"])
            self.answer({"data": [{"id": "theirs", "max_model_len": 40}]})

    def do_POST(self) -> None:
        body = self.body()
        self.authorized.append(self.headers["Authorization"])
        if self.path == "/tokenize":
            self.read.append(body["prompt"])
            self.answer({"tokens": letters(body["prompt"])})
            return
        self.seen.append((body, self.headers["x-slo-tpot-ms"]))
        self.e2e.append(self.headers["x-slo-e2e-ms"])
        if body["seed"] % 2:
            self.answer({"error": {"message": "seed: is odd"}}, 400)
            return
        last = {
            "token_ids": [1] * 5,
            "finish_reason": "length",
            "metrics": {"acceptance_length": 2.5},
        }
        events = [json.dumps({"token_ids": [1]}), json.dumps(last), "[DONE]"]
        self.send("".join(f"data: {one}\n\n" for one in events).encode())


@pytest.fixture
def server() -> Iterator[str]:
    Answers.seen, Answers.authorized, Answers.read, Answers.e2e = [], [], [], []
    with serving(Answers) as url:
        yield url


def test_server_is_asked_with_headers_and_judged_by_the_clients_clock(server: str) -> None:
    service = ServerService(server)
    asked = load_request(token_ids=(5, 6), new_tokens=6, seed=2, objective_ms=12.5, tenant="ours")
    pending = service.send(asked)
    answer = pending.answer()
    assert pending.is_done
    assert (answer.error, answer.tokens, answer.acceptance_length) == (None, 6, 2.5)
    assert answer.ttft_ms is not None
    assert answer.ttft_ms > 0
    assert answer.tpot_ms is not None
    body, header = Answers.seen[0]
    assert header == "12.5"
    assert body["input_ids"] == [5, 6]
    assert (body["prefix_cache"], body["cache_salt"]) == (False, "ours")
    assert (body["stream"], body["ignore_eos"], body["max_new_tokens"]) == (True, True, 6)
    answer = service.send(
        load_request(token_ids=(5, 6), new_tokens=6, seed=3, e2e_ms=5000.0)
    ).answer()
    assert answer.error is not None
    assert "seed: is odd" in answer.error
    assert Answers.seen[1][1] is None
    assert Answers.e2e == [None, "5000"]
    assert set(Answers.authorized) == {None}


def test_run_against_a_server_has_one_row(server: str) -> None:
    options = LoadOptions(config=None, poisson=1.0, server=server)
    bench = LoadBench(
        ServerService(server), letters, {"a": ["b"]}, options, Progress(stream=io.StringIO())
    )
    with pytest.raises(MeasurementError, match="seed: is odd"):
        bench.run([point(6)])
    even = Point(1.0, 1.0, 1.0, point(6).arrivals[:1])
    assert bench.run([even])["points"][0]["policies"]["server"]["requests"] == 1


KEY = "the-key"


@pytest.mark.parametrize("given", [True, False])
def test_key_goes_to_the_server_and_nowhere_else(
    given: bool,
    server: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv(SERVICE_VARIABLE, "the-other" if given else KEY)
    trace, file = tmp_path / "trace.csv", tmp_path / "load.json"
    trace.write_text(ADASERVE)
    options = [f"--trace={trace}", "--scale=0.01", "--requests=2", "--output-tokens=6"]
    key = [f"--api-key={KEY}"] if given else []
    # The second request has an odd seed, and is refused: that is reported, with its cause.
    monkeypatch.setattr(LoadBench, "measure_baseline", lambda *_: BASELINE_MS)
    assert bench_server(server, *options, *key, f"--json={file}") == 0
    assert set(Answers.authorized) == {f"Bearer {KEY}"}
    out, err = capsys.readouterr()
    assert "seed: is odd" in err
    assert KEY not in out + err + file.read_text()


def test_prompts_for_a_server_are_in_its_own_ids_and_within_its_limit(
    server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def opens(*_: object, **__: object) -> None:
        raise AssertionError("no model is needed here")

    monkeypatch.setattr("specrouter.bench.load.ModelPool", opens)
    prompts, trace = tmp_path / "prompts.jsonl", tmp_path / "trace.csv"
    prompts.write_text('{"prompt": "abc"}')
    trace.write_text(ADASERVE)
    options = ["--scale=0.01", "--requests=2", "--output-tokens=6", f"--prompts={prompts}"]
    monkeypatch.setattr(LoadBench, "measure_baseline", lambda *_: BASELINE_MS)
    assert bench_server(server, f"--trace={trace}", *options, "--json=-") == 0
    assert Answers.read == ["abc"]  # once
    for body, _ in Answers.seen:
        assert bytes(body["input_ids"]).startswith(b"abcabc")
        assert len(body["input_ids"]) <= 40 - 6
    found = json.loads(capsys.readouterr().out.splitlines()[-1])["conditions"]
    assert (found["target"], found["max_request_tokens"], found["config"]) == ("theirs", 40, None)
    assert bench_server(server, "--poisson=1", "--output-tokens=40") == 2
    assert "--output-tokens: must be below" in capsys.readouterr().err


@pytest.mark.parametrize("answer", [{}, {"data": []}, {"data": [{"id": "x"}]}, []])
def test_a_server_that_does_not_say_what_it_serves_is_refused(
    answer: Any, server: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Answers, "do_GET", lambda self: self.answer(answer))
    with pytest.raises(ConfigError, match=r"--server: .* does not say what it serves"):
        ServerService(server)


def test_a_server_that_does_not_tokenize_fails_the_measurement(
    server: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    service = ServerService(server)
    monkeypatch.setattr(Answers, "do_POST", lambda self: self.answer({}))
    with pytest.raises(MeasurementError, match="does not tokenize"):
        service.tokenize("abc")


def test_the_variable_is_the_service_s_own() -> None:
    assert SERVICE_VARIABLE == keys.API_KEY_VARIABLE


def test_a_key_that_cannot_be_sent_is_refused_without_telling_it(
    server: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(SERVICE_VARIABLE, "its secret")
    for options, named in (([], SERVICE_VARIABLE), (["--api-key", "my secret"], "--api-key")):
        assert bench_server(server, "--poisson", "1", *options) == 2
        error = capsys.readouterr().err
        assert error.startswith(f"specrouter: {named}: must be printable")
        assert "secret" not in error


# Output


def document() -> dict[str, Any]:
    router = FakeRouter()
    first = point()
    points = [
        Point(scale, share, slo, first.arrivals)
        for scale, share, slo in ((1.0, 0.5, 1.0), (2.0, 0.5, 1.0), (1.0, 0.8, 1.0), (1, 0.5, 2.0))
    ]
    found = load_bench(router, policy=("target-only", "goodput")).run(points)
    conditions = {"server": "x", "baseline_ms": 20.0}
    return {"conditions": conditions, **found}


@pytest.mark.slow
def test_plots_are_written_for_what_varies(tmp_path: Path) -> None:
    if importlib.util.find_spec("matplotlib") is None:
        pytest.skip("needs matplotlib")
    found = document()
    written = write_load_plots(found, tmp_path / "load.png")
    names = ["load.png", *(f"load-{name}.png" for name in ("rate", "urgent", "slo"))]
    assert [path.name for path in written] == names
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in written)
    found["points"] = found["points"][:1]
    found["points"][0]["requests_per_s"] = None  # all arrive at once
    assert write_load_plots(found, tmp_path / "one.png") == [tmp_path / "one.png"]


def test_running_requests_over_time_are_counted() -> None:
    times, counts = running_over_time([[0.0, 2.0], [1.0, 3.0]])
    assert (times, counts) == ([0.0, 0.0, 1.0, 2.0, 3.0], [0, 1, 2, 1, 0])


def test_the_document_is_written_where_it_is_asked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found, file = document(), tmp_path / "load.json"
    write_load(found, LoadOptions(config=Path("x"), poisson=1.0, json=file))
    out, err = capsys.readouterr()
    assert "{" not in out
    assert err == f"wrote {file}\n"
    whole = json.loads(file.read_text())
    assert list(whole["series"]) == ["target-only", "goodput"]
    write_load(found, LoadOptions(config=Path("x"), poisson=1.0, json=Path("-")))
    out, err = capsys.readouterr()
    assert json.loads(out.splitlines()[-1]) == whole
    assert err == ""
    lines = load_table(found).splitlines()
    [row] = [line.split() for line in lines if line.startswith("goodput")][:1]
    assert row[1:3] == ["100%", "0"]
    assert "scale 2: 1000.00 requests/s, 50% urgent, objectives x 1" in lines
    assert lines[1] == "baseline latency 20.00 ms"


def test_three_requests_on_the_bundled_pool(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text(ADASERVE)
    options = ["--trace", str(trace), "--scale", "0.01", "--requests=3", "--output-tokens=4"]
    files = [f"--plot={tmp_path / 'load.png'}", f"--json={tmp_path / 'load.json'}"]
    policies = ["--policy", "goodput", "--rows=2"]
    assert bench(*options, *policies, *files) == 0
    out, err = capsys.readouterr()
    document = json.loads((tmp_path / "load.json").read_text())
    assert "{" not in out
    assert (tmp_path / "load.png").exists()
    assert err.splitlines()[-2:] == [f"wrote {tmp_path}/load.json", f"wrote {tmp_path}/load.png"]
    assert document["conditions"]["baseline_ms"] > 0
    assert document["conditions"]["rows"] == 2
    row = document["points"][0]["policies"]["goodput"]
    assert (row["requests"], row["errors"]) == (3, 0)
    assert row["tokens_per_s"] * row["duration_s"] == pytest.approx(12)
    assert "round 1: goodput: " in err
