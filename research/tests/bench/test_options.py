"""What `python -m research` is asked for: a bad argument is one line that names it."""

import pytest

from research.__main__ import main
from specrouter import ChainRouter
from specrouter.cli.arguments import default_config
from specrouter.request.params import MAX_DEPTH

TINY = str(default_config())
# By the command: arguments of which the first is bad, or does not go with the others.
BAD = {
    "chains": [
        f"--depths {MAX_DEPTH + 1}",
        "--widths 8 --depths 16",
        "--api-key é --peer http://127.0.0.1:9",
        "--api-key key",
        "--peer llama-server=127.0.0.1:9",
        "--workload agents",
        "--temperature 0.5 --workload agent",
        "--peer http://127.0.0.1:9 --workload agent",
        "--only transformers --workload agent",
    ],
    "load": [
        "--trace /none.csv",
        "--trace x --poisson 1",
    ],
    "load --poisson 1": [
        "--skip 1",
        "--ttft-slowdown nan",
        "--scale 1 0",
        "--output-tokens 1",
        "--output-tokens 1024",
        "--length-scale -1",
        "--trace-baseline-ms 0",
        "--policy fastest",
        "--policy vllm",
        "--policy slo slo",
        "--prompts /none.jsonl",
        "--rows 0",
    ],
}
CASES = [(f"{command} {case}", case.split()[0]) for command in BAD for case in BAD[command]]


@pytest.mark.parametrize(("line", "argument"), [*CASES, ("load", "--trace")])
def test_a_bad_argument_is_one_line_that_names_it_before_anything_is_loaded(
    line: str, argument: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def loads(*_: object) -> None:
        raise AssertionError("nothing may be loaded")

    monkeypatch.setattr(ChainRouter, "from_config", loads)
    try:
        code = main([*line.split(), "--config", TINY])
    except SystemExit as exit_:  # argparse's own complaints
        code = int(str(exit_.code))
    assert code == 2
    error = capsys.readouterr().err
    assert argument in error
    assert error.count("\n") == 1
