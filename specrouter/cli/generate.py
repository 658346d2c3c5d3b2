"""`specrouter generate`: continues one prompt on the terminal."""

from __future__ import annotations

import argparse
import logging
import sys
from typing import Any, Literal

from specrouter import ChainRouter, RequestError, RequestOutput, SamplingParams, Speculation
from specrouter.cli.arguments import Commands, add_config
from specrouter.config import RouterConfig
from specrouter.request.objective import check_positive, joined

_SHAPE = ("depth", "width", "inner_rounds")  # arguments that go with a chain
_SLO_OPTIONS = {
    "tpot_ms": "--slo-tpot-ms",
    "ttft_ms": "--slo-ttft-ms",
    "e2e_ms": "--slo-e2e-ms",
}


def add_generate(commands: Commands) -> None:
    parser = commands.add_parser("generate", help="continue one prompt on the terminal")
    parser.add_argument("prompt", metavar="PROMPT")
    add_config(parser)
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
    parser.add_argument("--inner-rounds", type=int, help=argparse.SUPPRESS)  # without effect
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


def _chain(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(","))
