"""The command line: `specrouter serve`, `check`, `generate`, `inflate`, `bench`.

Contract: a bad argument or configuration ends with exit code 2 and one line on stderr that names
the field; a generation or a measurement that fails, and a pool that does not fit, with 1; a service
whose engine has failed, with 3. Only here is logging configured.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import logging
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, NoReturn

from modelpool.errors import ConfigError
from modelpool.inflate.inflate import FAULTS, inflate_to
from specrouter import ChainRouter, RequestError, RequestOutput, SamplingParams, Speculation
from specrouter.config import RouterConfig
from specrouter.logs import configure_logs
from specrouter.request.objective import check_positive, joined

logger = logging.getLogger(__name__)

_BAD_INPUT = 2
_DOES_NOT_FIT = 1
_ENGINE_FAILED = 3
_SHAPE = ("depth", "width", "inner_rounds")  # arguments that go with a chain
_SLO_OPTIONS = {
    "tpot_ms": "--slo-tpot-ms",
    "ttft_ms": "--slo-ttft-ms",
    "e2e_ms": "--slo-e2e-ms",
}
_INTERRUPTED = 130  # 128 + SIGINT, as shells have it


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; returns the exit code."""
    arguments = _parser().parse_args(argv)
    try:
        if arguments.log_level is not None:
            configure_logs(arguments.log_level)
        exit_code: int = arguments.run(arguments)
        return exit_code
    except (ConfigError, RequestError) as error:
        _complain(error)
        return _BAD_INPUT
    except KeyboardInterrupt:
        return _INTERRUPTED
    except BrokenPipeError:
        # The reader left (`| head`). Python flushes stdout once more at exit: let it go nowhere.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _complain(error: Exception) -> None:
    """One line, whatever a library's message looks like."""
    print(f"specrouter: {' '.join(str(error).split())}", file=sys.stderr)


def default_config(name: str = "tiny.yaml") -> Path:
    """A bundled scenario: inside an installed package, or beside the packages in a checkout."""
    package = Path(__file__).resolve().parents[1]
    installed = package / "configs" / name
    return installed if installed.is_file() else package.parent / "configs" / name


def _serve(arguments: argparse.Namespace) -> int:
    # A web framework takes long to import; `generate` must not wait for it.
    from specrouter.cli.check import network_warnings
    from specrouter.http.serve import EngineFailureError, serve

    config = RouterConfig.load(arguments.config)
    given = {key: getattr(arguments, key) for key in ("host", "port", "log_format")}
    override = {key: value for key, value in given.items() if value is not None}
    server = config.server.model_copy(update=override)
    configure_logs(logging.INFO, server.log_format)
    for warning in network_warnings(server):
        logger.warning(warning)
    try:
        serve(config.model_copy(update={"server": server}))
    except EngineFailureError as error:
        _complain(error)
        return _ENGINE_FAILED
    return 0


def _check(arguments: argparse.Namespace) -> int:
    # Imports the models' own code, which other commands do when they load them.
    from specrouter.cli.check import check_config

    try:
        report = check_config(RouterConfig.load(arguments.scenario or arguments.config))
    except ConfigError as error:
        if arguments.json:
            fault = {"field": error.field, "reason": error.reason}
            print(json.dumps({"status": "invalid", "error": fault}, indent=2))
        raise
    print(json.dumps(report.to_json(), indent=2) if arguments.json else report.to_text())
    return 0 if report.fits else _DOES_NOT_FIT


def _generate(arguments: argparse.Namespace) -> int:
    params, times_ms = _sampling_params(arguments), _slo_times(arguments)
    output: RequestOutput | None = None
    config = _for_one_request(RouterConfig.load(arguments.config), arguments)
    with ChainRouter.from_config(config) as router:
        slo = joined(arguments.slo_class, times_ms, router.slo_classes, _SLO_OPTIONS)
        for delta in router.stream(arguments.prompt, params, _speculation(arguments), slo):
            print(delta.text, end="", flush=True)
            output = delta.output
    print(flush=True)
    if output is None:
        raise RuntimeError("the request ended without an output")
    print(_figures(output), file=sys.stderr)
    if output.error is not None:
        print(f"specrouter: generation failed: {output.error}", file=sys.stderr)
        return 1
    return 0


def _for_one_request(config: RouterConfig, arguments: argparse.Namespace) -> RouterConfig:
    """What the request will not use is not loaded before it."""
    names = {model.name for model in config.pool.models}
    if arguments.no_speculation:
        change: dict[str, Any] = {"policy": "target-only", "chain": None}
    elif arguments.chain is not None and names.issuperset(arguments.chain):
        change = {"policy": "static", "chain": arguments.chain}
    else:  # also for a chain of unknown models, which the router refuses
        return config
    scheduler = config.scheduler.model_copy(update=change)
    return config.model_copy(update={"scheduler": scheduler})


def _inflate(arguments: argparse.Namespace) -> int:
    source, out = arguments.source_dir, arguments.out_dir
    try:
        shape = inflate_to(source, out, arguments.parameters)
    except ConfigError:
        raise
    except FAULTS as error:
        reason = f"cannot inflate {str(source)!r} to {str(out)!r}: {error}"
        raise ConfigError("inflate", reason) from error
    print(f"{out}: {shape.parameter_count / 1e6:.1f}M parameters")
    return 0


def _bench_chains(arguments: argparse.Namespace) -> int:
    # Imports all of transformers' generation, which no other command waits for.
    from specrouter.bench.chains import bench_chains, write
    from specrouter.bench.options import Options
    from specrouter.bench.rounds import Progress

    options = Options(**_fields(Options, arguments))
    return _measured(lambda: write(bench_chains(options, Progress()), options))


def _bench_load(arguments: argparse.Namespace) -> int:
    from specrouter.bench.load import bench_load, write_load
    from specrouter.bench.load_options import LoadOptions
    from specrouter.bench.rounds import Progress

    if arguments.config is None and arguments.server is None:
        arguments.config = default_config("bench-cpu.yaml")
    options = LoadOptions(**_fields(LoadOptions, arguments))
    return _measured(lambda: write_load(bench_load(options, Progress()), options))


def _measured(measure: Callable[[], None]) -> int:
    from specrouter.bench.output_file import FileNotWrittenError
    from specrouter.bench.sample import MeasurementError

    try:
        measure()
    except MeasurementError as error:
        print(f"specrouter: the measurement failed: {error}", file=sys.stderr)
        return 1
    except FileNotWrittenError as error:
        _complain(error)
        return 1
    return 0


def _fields(options: type, arguments: argparse.Namespace) -> dict[str, Any]:
    """What the command line says of a dataclass's fields."""
    names = {field.name for field in dataclasses.fields(options)}
    given = {name: value for name, value in vars(arguments).items() if name in names}
    lists = {name: tuple(value) for name, value in given.items() if isinstance(value, list)}
    return {**given, **lists}


def _sampling_params(arguments: argparse.Namespace) -> SamplingParams:
    names = ("max_new_tokens", "temperature", "top_k", "top_p", "seed")
    given: dict[str, Any] = {name: getattr(arguments, name) for name in names}
    given["stop"] = tuple(arguments.stop)
    return SamplingParams(**{name: value for name, value in given.items() if value is not None})


def _speculation(arguments: argparse.Namespace) -> Speculation | Literal["off"] | None:
    if arguments.no_speculation:
        for name in _SHAPE:
            if getattr(arguments, name) is not None:
                option = f"--{name.replace('_', '-')}"
                raise RequestError(option, "means nothing with --no-speculation")
        return "off"
    shape = {name: getattr(arguments, name) for name in _SHAPE}
    if arguments.chain is None and all(value is None for value in shape.values()):
        return None
    return Speculation(chain=arguments.chain, **shape)


def _slo_times(arguments: argparse.Namespace) -> dict[str, float]:
    given = {name: getattr(arguments, f"slo_{name}") for name in _SLO_OPTIONS}
    times_ms = {name: value for name, value in given.items() if value is not None}
    for name, value in times_ms.items():
        check_positive(_SLO_OPTIONS[name], value)
    return times_ms


def _figures(output: RequestOutput) -> str:
    """One line: `64 tokens (length) | 310.2 tokens/s | ttft 41 ms | ...`."""
    metrics = output.metrics
    parts = [f"{metrics.output_tokens} tokens ({output.finish_reason})"]
    if metrics.ttft_ms is not None:
        decode_ms = (metrics.tpot_ms or 0.0) * max(metrics.output_tokens - 1, 0)
        rate = metrics.output_tokens / (metrics.ttft_ms + decode_ms) * 1000
        parts += [f"{rate:.1f} tokens/s", f"ttft {metrics.ttft_ms:.0f} ms"]
    if metrics.acceptance_length is not None:
        parts.append(f"acceptance length {metrics.acceptance_length:.2f}")
    if metrics.chains:
        parts.append(_chain_shares(metrics.chains))
    if metrics.attained is not None:
        parts.append("objective attained" if metrics.attained else "objective missed")
    return " | ".join([*parts, f"seed {output.seed}"])


def _chain_shares(chains: dict[tuple[str, ...], int]) -> str:
    """Each chain's share of the cycles, the most used first."""
    cycles = sum(chains.values())
    ordered = sorted(chains.items(), key=lambda item: -item[1])
    return ", ".join(f"{'>'.join(chain)} {count / cycles:.0%}" for chain, count in ordered)


class _Parser(argparse.ArgumentParser):
    """argparse, with one line for an error instead of the usage and a line."""

    def error(self, message: str) -> NoReturn:
        self.exit(_BAD_INPUT, f"{self.prog}: {message}\n")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="specrouter", description="Routed speculative decoding.")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    _add_serve(commands)
    _add_check(commands)
    _add_generate(commands)
    _add_inflate(commands)
    _add_bench(commands)
    return parser


def _add_serve(commands: argparse._SubParsersAction[_Parser]) -> None:
    parser = commands.add_parser("serve", help="answer HTTP requests until Ctrl-C")
    _add_config(parser)
    parser.add_argument("--host", help="address to listen on (default: the config's)")
    parser.add_argument(
        "--port", type=_port, help="port; 0 picks a free one (default: the config's)"
    )
    parser.add_argument(
        "--log-format", choices=("text", "json"), help="of the log (default: the config's)"
    )
    parser.set_defaults(run=_serve, log_level=None)  # its format is in the configuration


def _add_check(commands: argparse._SubParsersAction[_Parser]) -> None:
    parser = commands.add_parser(
        "check",
        help="say whether a configuration is valid and its models fit; loads no weights, and "
        "downloads none but to make a member with inflate_to",
    )
    given = parser.add_mutually_exclusive_group()
    _add_config(given)
    given.add_argument(
        "scenario", type=_scenario, nargs="?", metavar="CONFIG", help="the same as --config"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.set_defaults(run=_check, log_level=logging.ERROR)


def _add_generate(commands: argparse._SubParsersAction[_Parser]) -> None:
    parser = commands.add_parser("generate", help="continue one prompt on the terminal")
    parser.add_argument("prompt", metavar="PROMPT")
    _add_config(parser)
    parser.add_argument("--max-new-tokens", type=int, metavar="N")
    parser.add_argument("--temperature", type=float, metavar="T", help="0, the default, is greedy")
    parser.add_argument("--top-k", type=int, metavar="K")
    parser.add_argument("--top-p", type=float, metavar="P")
    parser.add_argument("--seed", type=int, metavar="S")
    parser.add_argument(
        "--stop", action="append", default=[], metavar="TEXT", help="may be given several times"
    )
    chain = parser.add_mutually_exclusive_group()
    chain.add_argument(
        "--chain", type=_chain, metavar="A,B,C", help="models, weakest first, the target last"
    )
    chain.add_argument("--no-speculation", action="store_true", help="decode with the target only")
    parser.add_argument("--depth", type=int, metavar="D", help="tokens drafted per cycle")
    parser.add_argument("--width", type=int, metavar="W", help="branches of the token tree")
    parser.add_argument(
        "--inner-rounds", type=int, metavar="R", help="drafts that the first intermediate judges"
    )
    _add_slo(parser)
    parser.set_defaults(run=_generate, log_level=logging.WARNING)


def _add_slo(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--slo-tpot-ms", type=float, metavar="MS", help="objective: time of a token after the first"
    )
    parser.add_argument(
        "--slo-ttft-ms", type=float, metavar="MS", help="objective: time to the first token"
    )
    parser.add_argument(
        "--slo-e2e-ms", type=float, metavar="MS", help="objective: time to the last token"
    )
    parser.add_argument("--slo-class", metavar="NAME", help="objectives of the config's class")


def _add_inflate(commands: argparse._SubParsersAction[_Parser]) -> None:
    parser = commands.add_parser(
        "inflate", help="widen and deepen a small checkpoint without changing its function"
    )
    parser.add_argument("source_dir", type=Path, metavar="SOURCE_DIR")
    parser.add_argument("out_dir", type=Path, metavar="OUT_DIR")
    parser.add_argument("--parameters", type=int, default=200_000_000, metavar="N", help="at least")
    parser.set_defaults(run=_inflate, log_level=logging.WARNING)


def _add_bench(commands: argparse._SubParsersAction[_Parser]) -> None:
    bench = commands.add_parser("bench", help="measure speed")
    what = bench.add_subparsers(metavar="WHAT", required=True)
    _add_bench_chains(what)
    _add_bench_load(what)


def _add_bench_chains(what: argparse._SubParsersAction[_Parser]) -> None:
    parser = what.add_parser(
        "chains",
        help="each chain and policy against transformers and against the target alone",
        description="Contenders take turns; figures are medians of ratios within a round. "
        "The last line is one JSON document.",
    )
    _add_config(parser, "bench-cpu.yaml", "the bundled pool with an inflated target")
    _add_bench_work(parser)
    _add_bench_contenders(parser)
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="needs matplotlib")
    parser.add_argument("--json", type=Path, metavar="FILE", help="the JSON document, also here")
    parser.set_defaults(run=_bench_chains, log_level=logging.WARNING)


def _add_bench_work(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--prompts", type=Path, nargs="+", default=[], metavar="FILE",
        help="JSON lines with prompt, question, text or turns; each file is a category "
        "(default: a dozen built-in prompts)",
    )  # fmt: skip
    parser.add_argument(
        "--batch", type=int, nargs="+", metavar="B",
        help="requests together (default: 1 4 8 16, up to the config's engine.max_requests)",
    )  # fmt: skip
    parser.add_argument("--rounds", type=int, default=5, metavar="N", help="default: 5")
    parser.add_argument("--new-tokens", type=int, default=64, metavar="N", help="default: 64")
    parser.add_argument(
        "--temperature", type=float, default=1.0, metavar="T", help="default: 1; 0 is greedy"
    )
    parser.add_argument(
        "--by-category", action="store_true",
        help="batches of one category each; ratios are means over categories",
    )  # fmt: skip
    parser.add_argument(
        "--min-distinct", type=float, default=0.5, metavar="SHARE",
        help="greedy texts with fewer distinct 4-grams are repetitive (default: 0.5)",
    )  # fmt: skip


def _add_bench_contenders(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--only", nargs="+", metavar="NAME",
        help="transformers, assisted, assisted:DRAFTER, static, A>B>C, ssd-smallest, ssd-tuned, "
        "paper, adaptive; the target alone (off) always takes part",
    )  # fmt: skip
    for name, values in (("depths", [1, 2, 3, 4, 6]), ("widths", [1, 2, 3])):
        shown = " ".join(map(str, values))
        parser.add_argument(
            f"--{name}", type=int, nargs="+", default=values, metavar="N",
            help=f"among which a static chain's best is found (default: {shown})",
        )  # fmt: skip
    parser.add_argument(
        "--peer", metavar="URL", help="a server with OpenAI's completions, as a contender"
    )
    parser.add_argument("--api-key", metavar="KEY", help="of that server (default: OPENAI_API_KEY)")


def _add_bench_load(what: argparse._SubParsersAction[_Parser]) -> None:
    parser = what.add_parser(
        "load",
        help="which requests get their tokens in time, when they come as a trace says",
        description="Open-loop replay: requests are sent at their times whatever the state of the "
        "service; policies take turns on the same ones. The last line is one JSON document.",
    )
    _add_config(parser, "bench-cpu.yaml", "the bundled pool with an inflated target")
    parser.set_defaults(config=None)  # to tell whether it is given
    _add_load_arrivals(parser)
    _add_load_lengths(parser)
    _add_load_runs(parser)
    parser.add_argument(
        "--plot", type=Path, metavar="PREFIX",
        help="files PREFIX-rate.png, -urgent.png, -slo.png, -series.png; needs matplotlib",
    )  # fmt: skip
    parser.add_argument(
        "--json", type=Path, metavar="FILE",
        help="the JSON document, with the times of single requests",
    )  # fmt: skip
    parser.set_defaults(run=_bench_load, log_level=logging.WARNING)


def _add_load_arrivals(parser: argparse.ArgumentParser) -> None:
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument(
        "--trace", type=Path, metavar="FILE", help="a CSV file of AdaServe's or of Azure's format"
    )
    source.add_argument(
        "--poisson", type=float, metavar="RATE", help="requests per second, at random times"
    )
    parser.add_argument(
        "--lengths", choices=("adaserve", "specrouter"),
        help="of Poisson arrivals: AdaServe's mix with its objectives (default), or the four "
        "datasets of SpecRouter's evaluation, without objectives",
    )  # fmt: skip
    parser.add_argument(
        "--e2e-ms", type=float, metavar="MS",
        help="objective: time to the last token of every request, beside the trace's objectives",
    )  # fmt: skip
    parser.add_argument(
        "--scale", type=float, nargs="+", default=[1.0], metavar="X",
        help="times the gaps between requests: 2 halves the rate (default: 1); several are a sweep",
    )  # fmt: skip
    parser.add_argument("--requests", type=int, default=200, metavar="N", help="default: 200")
    parser.add_argument(
        "--skip", type=int, default=0, metavar="K", help="of the trace, from its start (default: 0)"
    )
    parser.add_argument(
        "--urgent-share", type=float, nargs="+", default=[], metavar="SHARE",
        help="of the category with the tightest objective, redrawn (default: the trace's)",
    )  # fmt: skip
    parser.add_argument(
        "--slo-scale", type=float, nargs="+", default=[1.0], metavar="F",
        help="times all objectives (default: 1)",
    )  # fmt: skip
    parser.add_argument(
        "--trace-baseline-ms", type=float, default=30.0, metavar="MS",
        help="baseline latency behind the trace's objectives in milliseconds (default: 30)",
    )  # fmt: skip


def _add_load_lengths(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--output-tokens", type=int, metavar="N",
        help="of each request (default: the trace's, times the length scale)",
    )  # fmt: skip
    parser.add_argument(
        "--length-scale", type=float, default=0.25, metavar="F",
        help="times the trace's lengths (default: 0.25)",
    )  # fmt: skip
    parser.add_argument(
        "--prompts", type=Path, nargs="+", default=[], metavar="FILE",
        help="JSON lines; chosen by the trace's categories, cut or repeated to its lengths "
        "(default: a dozen built-in prompts)",
    )  # fmt: skip


def _add_load_runs(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--policy", nargs="+", metavar="P",
        help="target-only, fixed-4, fixed-6, fixed-8, static-tree, equal-greedy, global-greedy, "
        "adaserve, slo, costmodel (default: target-only fixed-4 global-greedy slo costmodel)",
    )  # fmt: skip
    parser.add_argument("--rounds", type=int, default=1, metavar="N", help="default: 1")
    parser.add_argument(
        "--temperature", type=float, default=1.0, metavar="T", help="default: 1; 0 is greedy"
    )
    parser.add_argument("--seed", type=int, default=0, metavar="S", help="default: 0")
    parser.add_argument(
        "--rows", type=int, metavar="N", help="requests together (default: the config's)"
    )
    parser.add_argument(
        "--simulate", type=float, metavar="A",
        help="in simulated time, where nothing else runs: cycles take what this machine's measured "
        "curves say, and a drafter's best token is accepted in the share A of cases",
    )  # fmt: skip
    parser.add_argument(
        "--server", metavar="URL",
        help="a running specrouter server, under its own configuration, instead of a router here",
    )  # fmt: skip
    parser.add_argument(
        "--api-key", metavar="KEY", help="of that server (default: SPECROUTER_API_KEY)"
    )


def _add_config(
    parser: argparse._ActionsContainer,
    name: str = "tiny.yaml",
    described: str = "the bundled tiny pool",
) -> None:
    parser.add_argument(
        "--config", type=_scenario, default=default_config(name), metavar="FILE",
        help="a YAML scenario, or the name of a bundled one, such as qwen2.5 "
        f"(default: {described})",
    )  # fmt: skip


def _scenario(text: str) -> Path:
    """A file; where there is none of this name, the bundled scenario that is called so."""
    path, bundled = Path(text), default_config(f"{text}.yaml")
    return bundled if not path.exists() and bundled.is_file() else path


def _port(text: str) -> int:
    port = int(text)
    if not 0 <= port <= 65535:
        raise argparse.ArgumentTypeError(f"{port} is not between 0 and 65535")
    return port


def _chain(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(","))
