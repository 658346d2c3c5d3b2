"""Machine files: what they hold, and how a wrong field is named."""

from pathlib import Path

import pytest
import yaml

from modelpool.errors import ConfigError
from specrouter.cli.main import main
from specrouter.sim.machine import load_machine

FOLDER = Path(__file__).parents[3] / "configs" / "machines"
GOOD = {
    "drafter": {"name": "d", "parameters": 1, "points": [[1, 1.0]]},
    "target": {"name": "t", "parameters": 9, "points": [[1, 10.0], [64, 20.0]]},
    "prefill_chunk": 64,
    "max_requests": 8,
}


def test_published_machines_have_the_published_times() -> None:
    llama = load_machine(FOLDER / "adaserve-llama70b.yaml")
    assert llama.times[llama.target].at(512) == 125.0
    assert (llama.times[llama.drafters[0]].at(1), llama.max_requests) == (5.0, 64)
    qwen = load_machine(FOLDER / "adaserve-qwen32b.yaml")
    assert (qwen.times[qwen.target].at(1024), qwen.times[qwen.target].at(1)) == (188.0, 28.0)


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
    ],
)
def test_a_wrong_field_is_named(tmp_path: Path, field: str, value: object) -> None:
    section, _, name = field.partition(".")
    given = GOOD[section] if name else None
    changed = {**given, name: value} if isinstance(given, dict) else value
    file = tmp_path / "machine.yaml"
    file.write_text(yaml.safe_dump({**GOOD, section: changed}))
    with pytest.raises(ConfigError, match=f"--machine: .*{field}"):
        load_machine(file)


def test_a_machine_may_have_several_drafters_and_what_is_accepted_of_each(tmp_path: Path) -> None:
    drafter = {"name": "e", "parameters": 3, "points": [[1, 2.0]]}
    several = {"drafters": [drafter, GOOD["drafter"]], "acceptance": {"d>e": 0.8, "e>t": 0.9}}
    rest = {name: value for name, value in GOOD.items() if name != "drafter"}
    file = tmp_path / "machine.yaml"
    file.write_text(yaml.safe_dump({**rest, **several, "kv_tokens": 500}))
    machine = load_machine(file)
    assert machine.names == ("d", "e", "t")
    assert machine.acceptance == {("d", "e"): 0.8, ("e", "t"): 0.9}
    assert machine.kv_tokens == 500


def test_a_drafter_does_not_verify_for_a_larger_one(tmp_path: Path) -> None:
    drafter = {"name": "e", "parameters": 3, "points": [[1, 2.0]]}
    rest = {name: value for name, value in GOOD.items() if name != "drafter"}
    several = {"drafters": [drafter, GOOD["drafter"]], "acceptance": {"e>d": 0.8}}
    file = tmp_path / "machine.yaml"
    file.write_text(yaml.safe_dump({**rest, **several}))
    with pytest.raises(ConfigError, match=r"acceptance\.e>d: the verifier must have more"):
        load_machine(file)


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--machine: .*cannot read"):
        load_machine(tmp_path / "none.yaml")


def test_the_command_simulates_a_machine_without_loading_a_model(
    capsys: pytest.CaptureFixture[str],
) -> None:
    asked = ["bench", "load", "--poisson", "3", "--requests", "12", "--simulate", "0.75"]
    asked += ["--machine", str(FOLDER / "adaserve-llama70b.yaml"), "--length-scale", "1"]
    asked += ["--policy", "target-only", "goodput"]
    assert main(asked) == 0
    first = capsys.readouterr().out
    assert "goodput" in first
    assert main(asked) == 0
    assert capsys.readouterr().out == first, "the same seeds give the same figures"


def test_a_machine_is_for_simulations_only(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["bench", "load", "--poisson", "3", "--machine", "x.yaml"]
    assert main(asked) == 2
    assert "--machine: goes with --simulate" in capsys.readouterr().err
