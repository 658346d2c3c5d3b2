"""`specrouter bench chains`, `load` and `turns`: their arguments, and how their errors are told."""

from __future__ import annotations

import argparse
import dataclasses
import logging
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specrouter.cli.arguments import Commands, add_config, complain, default_config
from specrouter.cli.target import add_fresh_times

if TYPE_CHECKING:
    from specrouter.bench.progress import Progress

_CONFIG = ("bench-cpu.yaml", "the bundled pool with an inflated target")
_NAMES: dict[str, Any] = {"nargs": "+", "metavar": "NAME"}
_FILES: dict[str, Any] = {"type": Path, "nargs": "+", "default": [], "metavar": "FILE"}
_JSON = {
    "--json": {
        "type": Path, "metavar": "FILE",
        "help": "write all figures and the conditions; - prints them as the last line",
    },
}  # fmt: skip


def _number(kind: type, metavar: str, default: float | None = None, text: str = "") -> Any:
    """An argument that is a number. Its help tells a default that is given."""
    told = "" if default is None else f"default: {default:g}"
    shown = f"{text} ({told})" if text and told else text or told
    return {"type": kind, "default": default, "metavar": metavar, "help": shown}


def _numbers(kind: type, metavar: str, default: list[Any] | None, text: str) -> Any:
    """Several."""
    return {"type": kind, "nargs": "+", "default": default, "metavar": metavar, "help": text}


# By the command's options.
_CHAINS: Mapping[str, Mapping[str, Any]] = {
    "--prompts": {
        **_FILES,
        "help": "JSON lines with prompt, question, text or turns; each file is a category "
        "(default: a dozen built-in prompts)",
    },
    "--workload": {
        "choices": ["agent"],
        "help": "recorded outputs are replayed, part by part, greedy: code edits, tool-call "
        "echoes, JSON, turns; or those of --prompts, lines with prompt and output",
    },
    "--batch": _numbers(
        int, "B", None,
        "requests together (default: 1 4 8 16, up to the config's engine.max_requests)",
    ),
    "--rounds": _number(int, "N", 5),
    "--new-tokens": _number(int, "N", None, "default: 64; at most 256 of a recorded output"),
    "--temperature": _number(
        float, "T", None, "default: 1; 0 is greedy, as recorded outputs are"
    ),
    "--by-category": {
        "action": "store_true",
        "help": "batches of one category each; ratios are means over categories",
    },
    "--only": {
        **_NAMES,
        "help": "transformers, assisted, assisted:DRAFTER, static, A>B>C, smallest, tuned, "
        "adaptive, or a chain policy of one's own (package.module:NAME); the target alone (off) "
        "always takes part",
    },
    "--depths": _numbers(
        int, "N", [1, 2, 3, 4, 6],
        "among which a static chain's best is found (default: 1 2 3 4 6)",
    ),
    "--widths": _numbers(
        int, "N", [1, 2, 3], "among which a static chain's best is found (default: 1 2 3)"
    ),
    "--peer": {
        "metavar": "URL",
        "help": "a server with OpenAI's completions, as a contender; llama-server=URL: "
        "llama.cpp's, on exported weights, asked for the same work as the engine",
    },
    "--api-key": {"metavar": "KEY", "help": "of that server (default: OPENAI_API_KEY)"},
}  # fmt: skip
_ARRIVALS: Mapping[str, Mapping[str, Any]] = {
    "--trace": {
        "type": Path, "metavar": "FILE",
        "help": "a CSV file of AdaServe's or of Azure's format",
    },
    "--poisson": _number(float, "RATE", None, "requests per second, at random times"),
}  # fmt: skip
_LOAD: Mapping[str, Mapping[str, Any]] = {
    "--lengths": {
        "choices": ("adaserve", "specrouter"),
        "help": "of Poisson arrivals: AdaServe's mix with its objectives (default), or the four "
        "datasets of SpecRouter's evaluation, without objectives",
    },
    "--scale": _numbers(
        float, "X", [1.0],
        "times the gaps between requests: 2 halves the rate (default: 1); several are a sweep",
    ),
    "--requests": _number(int, "N", 200),
    "--skip": _number(int, "K", 0, "of the trace, from its start"),
    "--urgent-share": _numbers(
        float, "SHARE", [],
        "of the category with the tightest objective, redrawn (default: the trace's)",
    ),
    "--e2e-ms": _number(
        float, "MS", None,
        "objective: time to the last token of every request, in addition to the trace's objectives",
    ),
    "--ttft-slowdown": _number(
        float, "F", None,
        "objective: time to the first token of every request, as so many times that of a prompt "
        "of its length alone",
    ),
    "--slo-scale": _numbers(float, "F", [1.0], "times all objectives (default: 1)"),
    "--trace-baseline-ms": _number(
        float, "MS", 30.0, "baseline latency behind the trace's objectives in milliseconds"
    ),
    "--output-tokens": _number(
        int, "N", None, "of each request (default: the trace's, times the length scale)"
    ),
    "--length-scale": _number(float, "F", 0.25, "times the trace's lengths"),
    "--prompts": {
        **_FILES,
        "help": "JSON lines; chosen by the trace's categories, cut or repeated to its lengths "
        "(default: a dozen built-in prompts)",
    },
    "--rounds": _number(int, "N", 1),
    "--temperature": _number(float, "T", 1.0, "0 is greedy"),
    "--seed": _number(int, "S", 0),
    "--rows": _number(int, "N", None, "requests together (default: the config's)"),
}  # fmt: skip
_SERVER: Mapping[str, Mapping[str, Any]] = {
    "--policy": {
        **_NAMES,
        "help": "target-only, spec-4, spec-6, spec-8, global-greedy, goodput, slo (default: "
        "target-only spec-4 global-greedy goodput slo)",
    },
    "--server": {
        "metavar": "URL",
        "help": "a running specrouter server, under its own configuration, instead of a router "
        "here",
    },
    "--api-key": {"metavar": "KEY", "help": "of that server (default: SPECROUTER_API_KEY)"},
}
_TURNS: Mapping[str, Mapping[str, Any]] = {
    "--chats": _number(int, "N", 12, "conversations"),
    "--turns": _number(int, "N", 5, "of each"),
    "--history": _number(int, "N", 1500, "tokens that the last turn repeats"),
    "--said": _number(int, "N", 48, "new tokens of a turn"),
    "--new-tokens": _number(int, "N", 16, "of an answer"),
    "--rows": _number(int, "N", 4, "requests of that length that KV memory is taken for"),
    "--temperature": _number(float, "T", 0.0, "0 is greedy"),
}


def add_bench(commands: Commands) -> None:
    what = commands.add_parser("bench", help="measure speed").add_subparsers(
        metavar="WHAT", required=True
    )
    chains = what.add_parser(
        "chains",
        help="each chain and policy against transformers and against the target alone",
        description="Contenders take turns; figures are medians of ratios within a round. "
        "Prints a table.",
    )
    add_config(chains, *_CONFIG)
    _add(chains, _CHAINS)
    _add_outputs(chains, "speed-ups by batch size")
    load = what.add_parser(
        "load",
        help="which requests get their tokens in time, when they come as a trace says",
        description="Open-loop replay: requests are sent at their times whatever the state of the "
        "service; policies take turns on the same ones. Prints a table for each point of a sweep.",
    )
    add_load_arguments(load)
    _add(load, _SERVER)
    turns = what.add_parser(
        "turns",
        help="the time to the first token in conversations, with the prefix cache and without",
        description="Every turn is asked twice, with what is cached and read whole, in alternating "
        "order. Prints a table of medians.",
    )
    add_config(turns, *_CONFIG)
    _add(turns, {**_TURNS, **_JSON})
    add_fresh_times(turns)
    for parser, run in ((chains, _bench_chains), (load, _bench_load), (turns, _bench_turns)):
        parser.set_defaults(run=run, log_level=logging.WARNING)


def add_load_arguments(parser: argparse.ArgumentParser) -> None:
    """Of a replay of requests, live or simulated, but for its policies."""
    add_config(parser, *_CONFIG)
    parser.set_defaults(config=None)  # to tell whether it is given
    _add(parser.add_mutually_exclusive_group(required=True), _ARRIVALS)
    _add(parser, _LOAD)
    _add_outputs(parser, "a run over time; of a sweep also FILE-rate.png, -urgent.png, -slo.png")


def _add(parser: argparse._ActionsContainer, options: Mapping[str, Mapping[str, Any]]) -> None:
    for name, given in options.items():
        parser.add_argument(name, **given)


def _add_outputs(parser: argparse.ArgumentParser, drawn: str) -> None:
    """Files that are written in addition to the table; stderr tells their paths."""
    plot = {"type": Path, "metavar": "FILE.png", "help": f"draw {drawn}; needs matplotlib"}
    _add(parser, {"--plot": plot, **_JSON})
    add_fresh_times(parser)


def _bench_chains(arguments: argparse.Namespace) -> int:
    # Imports all of transformers' generation, which no other command waits for.
    from specrouter.bench.chains import bench_chains, write
    from specrouter.bench.options import RECORDED_TOKENS, ChainsOptions

    is_recorded = arguments.workload is not None
    if arguments.new_tokens is None:
        arguments.new_tokens = RECORDED_TOKENS if is_recorded else 64
    if arguments.temperature is None:
        arguments.temperature = 0.0 if is_recorded else 1.0
    arguments.by_category |= is_recorded
    options = ChainsOptions(**options_from(ChainsOptions, arguments))
    return measured(partial(bench_chains, options), partial(write, options=options))


def _bench_load(arguments: argparse.Namespace) -> int:
    from specrouter.bench.load import bench_load, write_load
    from specrouter.bench.options import LoadOptions

    if arguments.config is None and arguments.server is None:
        arguments.config = default_config(_CONFIG[0])
    options = LoadOptions(**options_from(LoadOptions, arguments))
    return measured(partial(bench_load, options), partial(write_load, options=options))


def _bench_turns(arguments: argparse.Namespace) -> int:
    from specrouter.bench.options import TurnsOptions
    from specrouter.bench.turns import bench_turns, write

    options = TurnsOptions(**options_from(TurnsOptions, arguments))
    return measured(partial(bench_turns, options), partial(write, options=options))


def measured(
    measure: Callable[[Progress], Mapping[str, Any]], write: Callable[[Mapping[str, Any]], None]
) -> int:
    """Measures, shows what that is at, and writes the document. Returns the exit code."""
    from specrouter.bench.output_file import FileNotWrittenError
    from specrouter.bench.progress import Progress
    from specrouter.bench.sample import MeasurementError

    try:
        with Progress() as progress:
            document = measure(progress)
        write(document)
    except MeasurementError as error:
        print(f"specrouter: the measurement failed: {error}", file=sys.stderr)
        return 1
    except FileNotWrittenError as error:
        complain(error)
        return 1
    return 0


def options_from(options: type, arguments: argparse.Namespace) -> dict[str, Any]:
    """What the command line says of a dataclass's fields."""
    names = {field.name for field in dataclasses.fields(options)}
    given = {name: value for name, value in vars(arguments).items() if name in names}
    given["fresh_times"] = bool(given["fresh_times"])
    lists = {name: tuple(value) for name, value in given.items() if isinstance(value, list)}
    return {**given, **lists}
