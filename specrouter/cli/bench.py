"""`specrouter bench chains`, `load` and `turns`: their arguments, and how their errors are told."""

from __future__ import annotations

import argparse
import dataclasses
import logging
import sys
from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, get_args, get_origin, get_type_hints

from specrouter.bench.options import ChainsOptions, LoadOptions, TurnsOptions, flag
from specrouter.cli.arguments import Parser, add_config, complain, default_config
from specrouter.cli.target import add_fresh_times

if TYPE_CHECKING:
    from specrouter.progress import Progress

CONFIG = "bench-cpu.yaml"


def add_bench(parser: Parser) -> None:
    what = parser.add_subparsers(metavar="WHAT", required=True)
    chains = what.add_parser(
        "chains",
        help="tokens per second of each chain and policy, and over the target alone",
        description="Contenders take turns; figures are medians of ratios within a round. "
        "Prints a table.",
    )
    add_options(chains, ChainsOptions)
    load = what.add_parser(
        "load",
        help="which requests get their tokens in time, with speculation and without",
        description="Requests are sent at random times whatever the state of the service, the "
        "same ones with speculation and without, in turns. Prints a table.",
    )
    add_options(load, LoadOptions)
    load.set_defaults(config=None)  # to tell whether it is given
    turns = what.add_parser(
        "turns",
        help="the time to the first token in conversations, with the prefix cache and without",
        description="Every turn is asked twice, with what is cached and read whole, in alternating "
        "order. Prints a table of medians.",
    )
    add_options(turns, TurnsOptions)
    for parser, run in ((chains, _bench_chains), (load, _bench_load), (turns, _bench_turns)):
        parser.set_defaults(run=run, log_level=logging.WARNING)


def add_options(parser: argparse.ArgumentParser, options: type, but: Collection[str] = ()) -> None:
    """Add an argument for each field that is an option, and what all benchmarks have."""
    add_config(parser, CONFIG, "the bundled pool with an inflated target")
    told = [one.name for one in dataclasses.fields(options) if "help" in one.metadata]
    add_fields(parser, options, [name for name in told if name not in but])
    add_fresh_times(parser)


def add_fields(parser: argparse._ActionsContainer, options: type, names: Collection[str]) -> None:
    """Add fields of these names. The namespace has what is given: fields have defaults."""
    hints = get_type_hints(options)
    for field in dataclasses.fields(options):
        if field.name in names:
            given = _argument(hints[field.name], field)
            parser.add_argument(flag(field.name), default=argparse.SUPPRESS, **given)


def _argument(hint: Any, field: dataclasses.Field[Any]) -> dict[str, Any]:
    """How argparse is told of a field. Its help tells a default that is a number."""
    text, default = field.metadata["help"], field.default
    shown = default if isinstance(default, tuple) else (default,)
    if any(type(one) in (int, float) for one in shown):
        told = f"default: {' '.join(f'{one:g}' for one in shown)}"
        text = f"{text} ({told})" if text else told
    if hint is bool:
        return {"action": "store_true", "help": text}
    given = {"required": True} if default is dataclasses.MISSING else {}
    [kind] = [one for one in get_args(hint) if one is not type(None)] if _is_union(hint) else [hint]
    if get_origin(kind) is Literal:
        return {"choices": get_args(kind), "help": text, **given}
    given |= {"metavar": field.metadata["metavar"], "help": text}
    if get_origin(kind) is tuple:
        return {"type": get_args(kind)[0], "nargs": "+", **given}
    return {"type": kind, **given}


def _is_union(hint: Any) -> bool:
    return type(None) in get_args(hint)


def _bench_chains(arguments: argparse.Namespace) -> int:
    from specrouter.bench.chains import bench_chains, write

    options = ChainsOptions(**options_from(ChainsOptions, arguments))
    return measured(partial(bench_chains, options), partial(write, options=options))


def _bench_load(arguments: argparse.Namespace) -> int:
    from specrouter.bench.load import bench_load, write_load

    given = options_from(LoadOptions, arguments)
    if given["config"] is None and "server" not in given:
        given["config"] = default_config(CONFIG)
    options = LoadOptions(**given)
    return measured(partial(bench_load, options), partial(write_load, options=options))


def _bench_turns(arguments: argparse.Namespace) -> int:
    from specrouter.bench.turns import bench_turns, write

    options = TurnsOptions(**options_from(TurnsOptions, arguments))
    return measured(partial(bench_turns, options), partial(write, options=options))


def measured(
    measure: Callable[[Progress], Mapping[str, Any]], write: Callable[[Mapping[str, Any]], None]
) -> int:
    """Measure, show what that is at, and write the document. Returns the exit code."""
    from specrouter.bench.output_file import FileNotWrittenError
    from specrouter.bench.sample import MeasurementError
    from specrouter.progress import Progress

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
