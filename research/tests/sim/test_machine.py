"""Machine files: what they hold, and how a wrong field is named."""

from pathlib import Path

import pytest
import yaml

from modelpool.errors import ConfigError
from research.__main__ import main
from research.sim.machine import MACHINES, Machine, load_machine

GOOD = {
    "drafter": {"name": "d", "parameters": 1, "points": [[1, 1.0]]},
    "target": {"name": "t", "parameters": 9, "points": [[1, 10.0], [64, 20.0]]},
    "prefill_chunk": 64,
    "max_requests": 8,
}


WITHOUT_DRAFTER = {name: value for name, value in GOOD.items() if name != "drafter"}
LARGER = {"name": "e", "parameters": 3, "points": [[1, 2.0]]}


def loaded(folder: Path, machine: dict[str, object]) -> Machine:
    file = folder / "machine.yaml"
    file.write_text(yaml.safe_dump(machine))
    return load_machine(file)


def test_published_machines_have_the_published_times() -> None:
    llama = load_machine(MACHINES / "adaserve-llama70b.yaml")
    assert llama.times[llama.target].at(512) == 125.0
    assert (llama.times[llama.drafters[0]].at(1), llama.max_requests) == (5.0, 64)
    qwen = load_machine(MACHINES / "adaserve-qwen32b.yaml")
    assert (qwen.times[qwen.target].at(1024), qwen.times[qwen.target].at(1)) == (188.0, 28.0)


def test_adaserves_machines_have_its_settings() -> None:
    llama = load_machine(MACHINES / "adaserve-llama70b.yaml").trees
    qwen = load_machine(MACHINES / "adaserve-qwen32b.yaml").trees
    published = [
        (one.budget_tokens, one.drafter_tokens, one.max_depth, one.min_depth, one.max_width)
        for one in (llama, qwen)
    ]
    assert published == [(512, 96, 8, 4, 3), (256, 80, 5, 3, 3)]


def test_slos_serves_machines_have_the_published_batches_and_room() -> None:
    found = {
        size: load_machine(MACHINES / f"slos-serve-opt-{size}.yaml")
        for size in ("6.7b", "13b", "30b")
    }
    batches = {size: one.batch_times for size, one in found.items()}
    assert [one.tokens_within(50.0) for one in batches.values()] == [366, 253, 130]
    assert batches["13b"].ms(100, 4) == pytest.approx(7.213 + 4 * 3.341 + 31.73)
    for machine in found.values():
        assert machine.batch is not None
        curve = machine.times[machine.target]
        for tokens in (1, 60, 500, 3000, 9000):
            assert curve.at(tokens) == pytest.approx(machine.batch.ms(tokens))
    rooms = [one.kv_tokens or 0 for one in found.values()]
    assert rooms == [44_729, 57_227, 61_428], "memory over bytes of a token"


def test_a_drafting_step_is_what_it_adds_to_a_batch() -> None:
    machine = load_machine(MACHINES / "slos-serve-opt-13b.yaml")
    assert machine.times["opt-125m"].at(32) == pytest.approx(3.341)


@pytest.mark.parametrize("file", sorted(MACHINES.glob("*.yaml")), ids=lambda file: file.stem)
def test_every_machine_serves(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["simulate", "--poisson", "1", "--requests", "3", "--acceptance", "0.7"]
    asked += ["--policy", "vllm", "slo", "--output-tokens", "8", "--machine", str(file)]
    assert main(asked) == 0
    assert "vllm" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("prefill_chunk", 0),
        ("max_requests", "many"),
        ("kv_tokens", 1),
        ("drafters", [{"name": "e", "parameters": 1, "points": [[1, 1.0]]}]),
        ("acceptance", {"d>x": 0.5}),
        ("acceptance", {"d": 0.5}),
        ("acceptance", {"d>t": 1.5}),
        ("target.points", []),
        ("target.points", [[1, 5.0], [1, 6.0]]),
        ("target.points", [[1, 5.0], [8, 4.0]]),
        ("drafter.points", [[1, -1.0]]),
        ("drafter.parameters", 0),
        ("target.name", "d"),
        ("speed", 1),
        ("batch_terms", [[1.0, 1.0, 1.0]]),
        ("kv_memory_gb", 10.0),
        ("kv_bytes_per_token", 10),
        ("adaserve", {"max_depth": 0}),
        ("adaserve", {"order": "easiest"}),
    ],
)
def test_a_wrong_field_is_named(tmp_path: Path, field: str, value: object) -> None:
    section, _, name = field.partition(".")
    given = GOOD[section] if name else None
    changed = {**given, name: value} if isinstance(given, dict) else value
    with pytest.raises(ConfigError, match=f"--machine: .*{field}"):
        loaded(tmp_path, {**GOOD, section: changed})


def test_a_machine_may_have_several_drafters_and_what_is_accepted_of_each(tmp_path: Path) -> None:
    several = {"drafters": [LARGER, GOOD["drafter"]], "acceptance": {"d>e": 0.8, "e>t": 0.9}}
    machine = loaded(tmp_path, {**WITHOUT_DRAFTER, **several, "kv_tokens": 500})
    assert machine.names == ("d", "e", "t")
    assert machine.acceptance == {("d", "e"): 0.8, ("e", "t"): 0.9}
    assert machine.kv_tokens == 500


def test_a_drafter_does_not_verify_for_a_larger_one(tmp_path: Path) -> None:
    several = {"drafters": [LARGER, GOOD["drafter"]], "acceptance": {"e>d": 0.8}}
    with pytest.raises(ConfigError, match=r"acceptance\.e>d: the verifier must have more"):
        loaded(tmp_path, {**WITHOUT_DRAFTER, **several})


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--machine: .*cannot read"):
        load_machine(tmp_path / "none.yaml")


def test_a_machine_is_not_a_pool(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["simulate", "--poisson", "3", "--machine", "x.yaml", "--config", "tiny"]
    assert main(asked) == 2
    assert "--machine: not with --config" in capsys.readouterr().err
