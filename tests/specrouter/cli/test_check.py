"""What `specrouter check` finds, and says, without loading a model."""

from __future__ import annotations

import copy
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open

from modelpool.device_manager import DeviceInfo
from modelpool.errors import ConfigError
from modelpool.progress import LoadProgress
from specrouter import ChainRouter, SamplingParams, Speculation
from specrouter.cli.arguments import default_config
from specrouter.cli.check import CheckReport, check_config
from specrouter.cli.main import main
from specrouter.config import RouterConfig
from tests.modelpool.hub_headers import repository_headers

GIB = 2**30
ROW = 352  # slots for 256 tokens and a tree of up to 80, in whole blocks of 32
Settings = dict[str, Any]


def check(settings: Settings, *devices: DeviceInfo) -> CheckReport:
    return check_config(RouterConfig.load(settings), devices or (cpu(8 * GIB),))


def refused(settings: Settings, *devices: DeviceInfo) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        check(settings, *devices)
    return caught.value


def cpu(usable: int) -> DeviceInfo:
    """A CPU whose memory may all be used."""
    return DeviceInfo("cpu", free_bytes=usable, total_bytes=0)


def gpu(usable: int) -> DeviceInfo:
    return DeviceInfo("cuda:0", free_bytes=usable, total_bytes=0)


def machine(device: DeviceInfo) -> tuple[DeviceInfo, ...]:
    """Every machine has a CPU."""
    return (device, cpu(8 * GIB)) if device.is_accelerator else (device,)


@pytest.fixture
def settings(small_config: Settings) -> Settings:
    """Three Llamas in float64 on automatic devices; 8 requests of up to 256 tokens."""
    changed = copy.deepcopy(small_config)
    for model in changed["pool"]["models"]:
        model.pop("device", None)
    changed["server"] = {"chat_template": None}
    return changed


def target_alone(settings: Settings) -> Settings:
    pool = settings["pool"]
    models = [model for model in pool["models"] if model["name"] == pool["target"]]
    return settings | {"pool": pool | {"models": models}}


def sizes(report: CheckReport) -> tuple[int, int]:
    """Bytes of all weights, and of the KV of a token in all models."""
    weights = sum(member.weight_bytes for member in report.members)
    return weights, sum(member.kv_bytes_per_token for member in report.members)


def test_report_counts_weights_and_kv_of_every_model(settings: Settings) -> None:
    report = check(settings)
    assert report.fits
    assert (report.max_requests, report.max_request_tokens) == (8, 256)
    assert report.kv_tokens == 8 * ROW
    weights, per_token = sizes(report)
    assert [device.needed_bytes for device in report.devices] == [weights + per_token * 8 * ROW]
    assert sorted(member.role for member in report.members) == ["draft", "draft", "target"]
    for member in report.members:
        assert member.devices == ("cpu",)
        assert member.threads is not None
        assert member.dtype == "float64"
        assert member.weight_bytes == 8 * member.parameters


def test_replicas_on_this_machine_take_memory_together(settings: Settings) -> None:
    one = check(settings)
    [alone] = one.devices
    replicas = [{"name": "a", "count": 2}, {"name": "b", "engine": {"max_requests": 4}}]
    settings["cluster"] = {"replicas": replicas}
    report = check(settings)
    [device] = report.devices
    assert 2 * alone.needed_bytes < device.needed_bytes < 3 * alone.needed_bytes
    assert [member.name for member in report.members] == [
        f"{replica}/{member.name}" for replica in ("a-0", "a-1", "b") for member in one.members
    ]
    assert (report.max_requests, report.max_request_tokens) == (20, 256)
    assert report.fits
    small = check(settings, cpu(alone.needed_bytes * 2))
    assert small.problems[0].startswith("cpu has ")
    assert "all replicas together need" in small.problems[0]
    settings["cluster"]["address"] = "auto"
    assert check(settings, cpu(alone.needed_bytes)).fits
    assert any(one.startswith("cluster.address: ") for one in check(settings).warnings)


def test_kv_memory_is_counted_exactly(settings: Settings) -> None:
    """An amount in whole blocks, a share of the device, and what a request may have of either."""
    weights, per_token = sizes(check(settings))
    settings["engine"]["kv_memory"] = f"{300 * per_token}B"
    report = check(settings)
    assert report.fits
    assert report.kv_tokens == 288
    assert report.devices[0].needed_bytes == weights + per_token * 288
    warning = "engine.kv_memory: requests of more than 208 tokens are always refused"
    assert warning in report.warnings
    settings["engine"]["kv_memory"] = "25%"
    device = DeviceInfo("cpu", free_bytes=GIB, total_bytes=GIB)
    report = check(settings, device)
    assert report.kv_tokens == GIB // 4 // per_token // 32 * 32
    assert not [warning for warning in report.warnings if "kv_memory" in warning]


def test_kv_memory_that_does_not_fit_is_told_what_would(settings: Settings) -> None:
    weights, _ = sizes(check(settings))
    settings["engine"]["kv_memory"] = "4GiB"
    report = check(settings, cpu(weights + 3 * 2**20))
    assert not report.fits
    found = re.search(r"tokens of KV fit, so set engine.kv_memory: (\d+)MiB", report.problems[0])
    assert found is not None
    settings["engine"]["kv_memory"] = f"{found[1]}MiB"
    assert check(settings, cpu(weights + 3 * 2**20)).fits


@pytest.mark.parametrize("change", [{}, {"kv_budget_tokens": 100}, {"max_model_len": 100_000}])
def test_kv_that_is_counted_is_what_served_models_take(
    change: Settings, settings: Settings
) -> None:
    settings["engine"].update(change)
    counted = {member.name: member.kv_bytes for member in check(settings).members}
    with ChainRouter.from_config(settings) as router:
        whole_chain = Speculation(router.pool.names, depth=2)
        router.generate([[1, 2, 3]], SamplingParams(max_new_tokens=4), whole_chain)
        assert router.instruments.engine_state().kv_bytes == counted


def test_a_budget_of_tokens_is_all_the_memory_that_is_taken(settings: Settings) -> None:
    settings = target_alone(settings)
    weights, per_token = sizes(check(settings))
    settings["engine"]["kv_budget_tokens"] = 100
    report = check(settings)
    assert (report.max_request_tokens, report.kv_tokens) == (100, 192), "with a tree, whole blocks"
    assert check(settings, cpu(weights + 192 * per_token)).fits
    assert not check(settings, cpu(weights + 192 * per_token - 1)).fits


@pytest.mark.parametrize("device", [cpu, gpu])
def test_pool_that_does_not_fit_is_told_what_would(
    device: Callable[[int], DeviceInfo], settings: Settings
) -> None:
    settings = target_alone(settings)
    weights, per_token = sizes(check(settings))
    tokens = 3 * ROW + 10
    room = machine(device(weights + tokens * per_token))
    (problem,) = check(settings, *room).problems
    assert f"{tokens} tokens of KV fit" in problem
    assert "dtype" in problem
    advice = dict(re.findall(r"engine\.(\w+): (\d+)", problem))
    assert advice == {"max_requests": "3", "max_model_len": str(128 - 80)}
    for setting, value in advice.items():
        changed = copy.deepcopy(settings)
        changed["engine"][setting] = int(value)
        assert check(changed, *room).fits


def test_weights_alone_can_be_too_large(settings: Settings) -> None:
    weights, _ = sizes(check(settings))
    (problem,) = check(settings, cpu(weights // 2)).problems
    assert "the weights alone" in problem
    assert "engine." not in problem


def test_drafter_that_leaves_the_accelerator_is_a_warning_and_fits(settings: Settings) -> None:
    alone = check(settings)
    target = next(member for member in alone.members if member.role == "target")
    room = target.weight_bytes + target.kv_bytes
    report = check(settings, *machine(gpu(room)))
    assert report.fits
    by_name = {member.name: member for member in report.members}
    assert by_name[target.name].devices == ("cuda:0",)
    assert by_name[target.name].threads is None
    drafters = [member for member in report.members if member.role == "draft"]
    assert {member.devices for member in drafters} == {("cpu",)}
    for member in drafters:
        assert any(member.name in warning for warning in report.warnings)


def test_spread_target_is_counted_on_each_of_its_devices(settings: Settings) -> None:
    target = next(member for member in check(settings).members if member.role == "target")
    most = (target.weight_bytes + target.kv_bytes) * 9 // 10
    report = check(settings, gpu(most), DeviceInfo("cuda:1", most, 0), cpu(8 * GIB))
    placed = next(member for member in report.members if member.role == "target")
    assert placed.devices == ("cuda:0", "cuda:1")
    assert report.fits


@pytest.mark.parametrize(
    ("section", "change", "named"),
    [
        ("engine", {"max_model_len": 100_000}, "engine.max_model_len"),
        ("engine", {"kv_budget_tokens": 100}, "engine.kv_budget_tokens"),
        ("pool", {"memory_limit_mb": 1}, "pool.memory_limit_mb"),
        ("server", {"host": "0.0.0.0"}, "server.host"),
        ("server", {"cors_origins": ["*"]}, "server.cors_origins"),
        ("server", {"chat_template": None}, "server.chat_template"),
    ],
)
def test_what_works_otherwise_than_one_may_think_is_a_warning(
    section: str, change: Settings, named: str, settings: Settings
) -> None:
    settings[section].update(change)
    report = check(settings)
    assert report.fits
    assert any(warning.startswith(f"{named}: ") for warning in report.warnings)


LIMITS = ("max_loaded_models", "memory_limit_mb")


@pytest.mark.parametrize("limit", LIMITS)
def test_chain_that_a_limit_leaves_no_room_for_is_refused_as_it_is_when_served(
    limit: str, settings: Settings
) -> None:
    settings["scheduler"] = {"policy": "static", "chain": ["small", "target"]}
    assert check(settings).fits
    settings["pool"][limit] = 1
    for ask in (check, ChainRouter.from_config):
        with pytest.raises(ConfigError, match=r"^scheduler\.chain: "):
            ask(settings)


@pytest.mark.parametrize("limit", LIMITS)
def test_drafters_without_room_beside_the_target_are_a_warning_each(
    limit: str, settings: Settings
) -> None:
    settings["pool"][limit] = 1
    warnings = [warning for warning in check(settings).warnings if "never drafts" in warning]
    assert [warning.split(":")[0] for warning in warnings] == [f"pool.{limit}"] * 2
    assert ["'small'" in warnings[0], "'middle'" in warnings[1]] == [True, True]
    settings["scheduler"] = {"policy": "target-only"}
    assert not any("never drafts" in warning for warning in check(settings).warnings)
    del settings["scheduler"]
    settings["pool"][limit] = 2 if limit == "max_loaded_models" else 1000  # room for one more
    assert not any("never drafts" in warning for warning in check(settings).warnings)


def test_network_with_keys_is_no_warning(settings: Settings) -> None:
    settings["server"].update(host="0.0.0.0", api_keys=["key"], cors_origins=["*"])
    warnings = check(settings).warnings
    assert not [warning for warning in warnings if "api_keys" in warning]


def test_attention_is_shown_for_each_model_and_refused_where_it_has_no_kernels(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert {member.attention for member in check(settings).members} == {"path"}
    pool, devices = settings["pool"], machine(gpu(8 * GIB))
    target = next(model for model in pool["models"] if model["name"] == pool["target"])
    target["attention"] = "triton"
    assert refused(settings).field == f"pool.models[{pool['models'].index(target)}].attention"
    pool["attention"], target["attention"] = "path", None
    assert {member.attention for member in check(settings, *devices).members} == {"path"}
    monkeypatch.setattr("modelpool.attention.backend.find_spec", lambda name: object())
    pool["attention"] = "flashinfer"
    assert refused(settings, *devices).field == "pool.attention"


def test_template_that_cannot_be_used_is_an_error_of_its_setting(
    settings: Settings, tmp_path: Path
) -> None:
    template = tmp_path / "template.jinja"
    template.write_text("{% for message in messages %}")
    settings["server"]["chat_template"] = str(template)
    assert refused(settings).field == "server.chat_template"
    settings["server"]["chat_template"] = "templates/chat.jinja"
    assert str(Path.cwd() / "templates") in refused(settings).reason


@pytest.fixture
def hub(small_family: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Serves the family as hub:org/NAME, and fails where weights are downloaded."""

    def download(repository: str, allow_patterns: list[str], **_: Any) -> str:
        assert "*.safetensors" not in allow_patterns
        name = repository.partition("/")[2]
        without = shutil.ignore_patterns("*.safetensors")
        shutil.copytree(small_family[name], tmp_path / name, ignore=without, dirs_exist_ok=True)
        return str(tmp_path / name)

    def headers(repository: str, **_: Any) -> Any:
        name = repository.partition("/")[2]
        with safe_open(small_family[name] / "model.safetensors", "pt") as weights:
            slices = {key: weights.get_slice(key) for key in weights.keys()}  # noqa: SIM118
            return repository_headers(
                {key: (one.get_dtype(), one.get_shape()) for key, one in slices.items()}
            )

    monkeypatch.setattr("modelpool.checkpoint.source.snapshot_download", download)
    monkeypatch.setattr("modelpool.checkpoint.source.get_safetensors_metadata", headers)


@pytest.mark.usefixtures("hub")
@pytest.mark.parametrize("dtype", ["auto", "bfloat16"])
@pytest.mark.parametrize("room", [1000, 8 * GIB])
def test_hub_models_are_counted_without_their_weights(
    dtype: str, room: int, settings: Settings
) -> None:
    for model in settings["pool"]["models"]:
        model["dtype"] = dtype
    here = check(settings, cpu(room))
    for model in settings["pool"]["models"]:
        model["source"] = f"hub:org/{model['name']}"
    assert check(settings, cpu(room)) == here
    assert here.fits == (room > 1000)


def test_who_waits_is_told_which_model_is_looked_at(settings: Settings) -> None:
    progress = LoadProgress()
    check_config(RouterConfig.load(settings), (cpu(8 * GIB),), progress=progress)
    assert progress.step.model in {model["name"] for model in settings["pool"]["models"]}


# The command


def written(settings: Settings, folder: Path) -> str:
    path = folder / "scenario.yaml"
    path.write_text(json.dumps(settings, default=str))
    return str(path)


def test_bundled_scenario_is_valid_and_fits(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["status"], report["target"]) == ("ok", "tiny-8m")
    assert main(["check", str(default_config())]) == 0
    out, err = capsys.readouterr()
    assert "\ntiny-8m " in out
    assert out.endswith("The configuration is valid, and its models fit.\n")
    assert err == ""


def test_drafter_without_weights_takes_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "--config", str(default_config("tiny-ngram.yaml"))]) == 0
    assert "ngram: drafts from the text itself" in capsys.readouterr().out


def test_pool_that_does_not_fit_ends_with_code_1(
    settings: Settings,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    settings["engine"].update(max_requests=1024, max_model_len=2**31)
    monkeypatch.setattr("specrouter.cli.check.read_devices", lambda: (cpu(2**20),))
    path = written(settings, tmp_path)
    assert main(["check", path]) == 1
    assert "does not fit: cpu has " in capsys.readouterr().out
    assert main(["check", path, "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["status"] == "does_not_fit"


def test_invalid_configuration_ends_with_code_2_and_one_line(
    settings: Settings, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings["pool"]["models"][0]["source"] = "path:/none"
    assert main(["check", written(settings, tmp_path), "--json"]) == 2
    out, err = capsys.readouterr()
    assert json.loads(out)["error"]["field"] == "pool.models[0].source"
    assert err.startswith("specrouter: pool.models[0].source: ")
    assert err.count("\n") == 1


def test_classes_of_objectives_are_shown_and_the_ends_of_their_stages_checked(
    settings: Settings,
) -> None:
    def checked(end: str) -> CheckReport:
        stages = [{"tpot_ms": 20, "until_token": end}, {"tpot_ms": 60}]
        think = {"ttft_ms": 900, "stages": stages, "on_unattainable": "reject"}
        return check(settings | {"slo_classes": {"think": think}})

    report = checked(")")
    assert report.to_json()["slo_classes"]["think"]["stages"][1] == {"tpot_ms": 60.0}
    [line] = [one for one in report.to_text().splitlines() if one.startswith("class think: ")]
    assert json.loads(line.removeprefix("class think: ")) == report.slo_classes["think"]
    with pytest.raises(ConfigError, match=r"^slo_classes\.think\.stages\[0\]\.until_token: "):
        checked(") and more")


def test_what_a_token_reads_bounds_its_speed(settings: Settings) -> None:
    report = check_config(RouterConfig.load(settings), (cpu(8 * GIB),), read_speed=lambda _: 1e9)
    for member in report.members:
        assert member.weights == "plain"
        assert member.reads is not None
        assert member.reads.bytes < member.weight_bytes
        assert member.reads.bound_tokens_per_s == pytest.approx(1e9 / member.reads.bytes)
        assert member.reads_in_int8 is not None
        assert member.reads_in_int8.bytes < member.reads.bytes / 4, "float64 has eight bytes"
    (bound,) = (
        m.reads.bound_tokens_per_s for m in report.members if m.role == "target" and m.reads
    )
    assert f"{bound:.0f}/s" in report.to_text()
    without = check(settings)
    assert all(m.reads and m.reads.bound_tokens_per_s is None for m in without.members)


def test_int8_is_counted_and_said(settings: Settings) -> None:
    plain = {member.name: member for member in check(settings).members}
    for model in settings["pool"]["models"]:
        model["weights"] = "int8"
    for member in check(settings).members:
        assert member.weights == "int8"
        assert member.reads == member.reads_in_int8 == plain[member.name].reads_in_int8
        assert member.weight_bytes < plain[member.name].weight_bytes
        assert member.kv_bytes == plain[member.name].kv_bytes
