"""`specrouter bench chains`, `load` and `turns`: their arguments, and how their errors are told."""

from __future__ import annotations

import argparse
import dataclasses
import logging
import sys
from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, get_args, get_origin, get_type_hints

from specrouter.bench.options import RECORDED_TOKENS, ChainsOptions, LoadOptions, TurnsOptions, flag
from specrouter.cli.arguments import Parser, add_config, complain, default_config
from specrouter.cli.target import add_fresh_times

if TYPE_CHECKING:
    from specrouter.progress import Progress

_CONFIG = ("bench-cpu.yaml", "the bundled pool with an inflated target")
_ARRIVALS = ("trace", "poisson")
_SERVED = ("policy", "server", "api_key")  # means nothing to a simulation, or something else


def add_bench(parser: Parser) -> None:
    what = parser.add_subparsers(metavar="WHAT", required=True)
    chains = what.add_parser(
        "chains",
        help="each chain and policy against transformers and against the target alone",
        description="Contenders take turns; figures are medians of ratios within a round. "
        "Prints a table.",
    )
    _add_all(chains, ChainsOptions)
    load = what.add_parser(
        "load",
        help="which requests get their tokens in time, when they come as a trace says",
        description="Open-loop replay: requests are sent at their times whatever the state of the "
        "service; policies take turns on the same ones. Prints a table for each point of a sweep.",
    )
    add_load_arguments(load)
    _add(load, LoadOptions, _SERVED)
    turns = what.add_parser(
        "turns",
        help="the time to the first token in conversations, with the prefix cache and without",
        description="Every turn is asked twice, with what is cached and read whole, in alternating "
        "order. Prints a table of medians.",
    )
    _add_all(turns, TurnsOptions)
    for parser, run in ((chains, _bench_chains), (load, _bench_load), (turns, _bench_turns)):
        parser.set_defaults(run=run, log_level=logging.WARNING)


def add_load_arguments(parser: argparse.ArgumentParser) -> None:
    """Of a replay of requests, live or simulated, but for its policies."""
    _add(parser.add_mutually_exclusive_group(required=True), LoadOptions, _ARRIVALS)
    _add_all(parser, LoadOptions, but=(*_ARRIVALS, *_SERVED))
    parser.set_defaults(config=None)  # to tell whether it is given


def _add_all(parser: argparse.ArgumentParser, options: type, but: Collection[str] = ()) -> None:
    add_config(parser, *_CONFIG)
    told = [one.name for one in dataclasses.fields(options) if "help" in one.metadata]
    _add(parser, options, [name for name in told if name not in but])
    add_fresh_times(parser)


def _add(parser: argparse._ActionsContainer, options: type, names: Collection[str]) -> None:
    """Fields of these names. What is not given is not in the namespace: fields have defaults."""
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
    [kind] = [one for one in get_args(hint) if one is not type(None)] if _is_union(hint) else [hint]
    if get_origin(kind) is Literal:
        return {"choices": get_args(kind), "help": text}
    metavar = field.metadata["metavar"]
    if get_origin(kind) is tuple:
        return {"type": get_args(kind)[0], "nargs": "+", "metavar": metavar, "help": text}
    return {"type": kind, "metavar": metavar, "help": text}


def _is_union(hint: Any) -> bool:
    return type(None) in get_args(hint)


def _bench_chains(arguments: argparse.Namespace) -> int:
    # Imports all of transformers' generation, which no other command waits for.
    from specrouter.bench.chains import bench_chains, write

    given = options_from(ChainsOptions, arguments)
    if "workload" in given:
        recorded = {"new_tokens": RECORDED_TOKENS, "temperature": 0.0, "by_category": True}
        given = {**recorded, **given}
    options = ChainsOptions(**given)
    return measured(partial(bench_chains, options), partial(write, options=options))


def _bench_load(arguments: argparse.Namespace) -> int:
    from specrouter.bench.load import bench_load, write_load

    given = options_from(LoadOptions, arguments)
    if given["config"] is None and "server" not in given:
        given["config"] = default_config(_CONFIG[0])
    options = LoadOptions(**given)
    return measured(partial(bench_load, options), partial(write_load, options=options))


def _bench_turns(arguments: argparse.Namespace) -> int:
    from specrouter.bench.turns import bench_turns, write

    options = TurnsOptions(**options_from(TurnsOptions, arguments))
    return measured(partial(bench_turns, options), partial(write, options=options))


def measured(
    measure: Callable[[Progress], Mapping[str, Any]], write: Callable[[Mapping[str, Any]], None]
) -> int:
    """Measures, shows what that is at, and writes the document. Returns the exit code."""
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
