"""What `specrouter bench` is asked for: a bad argument is one line that names it."""

import pytest

from specrouter import ChainRouter
from specrouter.cli.arguments import default_config
from specrouter.cli.main import main

TINY = str(default_config())
# By the command: arguments of which the first is bad, or does not go with the others.
BAD = {
    "chains": [
        "--batch 0",
        "--rounds 0",
        "--new-tokens 0",
        "--new-tokens 1024",
        "--temperature -1",
        "--temperature nan",
        "--json /none/figures.json",
    ],
    "load --poisson 1": [
        "--poisson 0",
        "--e2e-ms 0",
        "--ttft-ms nan",
        "--requests 0",
        "--output-tokens 1",
        "--output-tokens 1024",
        "--input-tokens 0",
        "--prompts /none.jsonl",
        "--temperature 1e-9",
        f"--seed {2**64}",
        "--json /none/load.json",
        "--server localhost",
        f"--config {TINY} --server http://x",
        "--server http://127.0.0.1:9",
    ],
    "turns": [
        "--chats 0",
        "--turns 1",
        "--new-tokens 0",
        "--history 16 --said 9 --new-tokens 4 --turns 3",
    ],
}
CASES = [(f"{command} {case}", case.split()[0]) for command in BAD for case in BAD[command]]


@pytest.mark.parametrize(
    ("line", "argument"),
    [
        *CASES,
        ("load", "--poisson"),
        ("chains --config /none.yaml", "config"),
        ("load --poisson 1 --config /none.yaml", "config"),
    ],
)
def test_a_bad_argument_is_one_line_that_names_it_before_anything_is_loaded(
    line: str, argument: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def loads(*_: object) -> None:
        raise AssertionError("nothing may be loaded")

    monkeypatch.setattr(ChainRouter, "from_config", loads)
    config = [] if "--config" in line or "--server http" in line else ["--config", TINY]
    try:
        code = main(["bench", *line.split(), *config])
    except SystemExit as exit_:  # argparse's own complaints
        code = int(str(exit_.code))
    assert code == 2
    error = capsys.readouterr().err
    assert argument in error
    assert error.count("\n") == 1
