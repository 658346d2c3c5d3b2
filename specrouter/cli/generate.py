"""`specrouter generate`: continues one prompt on the terminal, and prints its speed."""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal

from specrouter.cli.arguments import Commands
from specrouter.cli.target import add_target, read_asked
from specrouter.target import DEFAULT, names_model, naming

if TYPE_CHECKING:
    from specrouter import SamplingParams, Speculation
    from specrouter.config import RouterConfig

_SHAPE = ("depth", "width")  # arguments that go with a chain
_TIMES = {"tpot_ms": "--slo-tpot-ms", "ttft_ms": "--slo-ttft-ms", "e2e_ms": "--slo-e2e-ms"}
_SLO_OPTIONS = {**_TIMES, "slo_class": "--slo-class"}


def add_generate(commands: Commands) -> None:
    parser = commands.add_parser("generate", help="continue one prompt on the terminal")
    parser.has_prompt = True
    add_target(parser)
    parser.add_argument(
        "prompt", metavar="PROMPT", help="behind TARGET, where there is one, and before --draft"
    )
    add_sampling(parser)
    chain = parser.add_mutually_exclusive_group()
    chain.add_argument(
        "--chain", type=_chain, metavar="A,B,C", help="models, weakest first, the target last"
    )
    chain.add_argument("--no-speculation", action="store_true", help="decode with the target only")
    parser.add_argument("--depth", type=int, metavar="D", help="tokens drafted per cycle")
    parser.add_argument("--width", type=int, metavar="W", help="branches of the token tree")
    times = ("of a token after the first", "to the first token", "to the last token")
    for (name, option), which in zip(_TIMES.items(), times, strict=True):
        help_ = f"objective: time {which}"
        parser.add_argument(option, dest=name, type=float, metavar="MS", help=help_)
    parser.add_argument("--slo-class", metavar="NAME", help="objectives of the config's class")
    parser.set_defaults(run=_generate, log_level=logging.WARNING)


def add_sampling(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--max-new-tokens", type=int, metavar="N")
    parser.add_argument("--temperature", type=float, metavar="T", help="0, the default, is greedy")
    parser.add_argument("--top-k", type=int, metavar="K")
    parser.add_argument("--top-p", type=float, metavar="P")
    parser.add_argument("--seed", type=int, metavar="S")
    parser.add_argument(
        "--stop", action="append", default=[], metavar="TEXT", help="may be given several times"
    )


def _chain(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(","))


def _generate(arguments: argparse.Namespace) -> int:
    """Generate, and return the exit code. Raises `ConfigError`, `RequestError`."""
    import specrouter
    from specrouter.config import slos_by_class
    from specrouter.notebook import figures
    from specrouter.progress import Progress, ShownLoad
    from specrouter.request.objective import joined

    # Errors of the arguments come before PyTorch is imported and models are loaded.
    if arguments.target is None and arguments.config is None and names_model(arguments.prompt):
        asks = f"{arguments.prompt!r} is a TARGET; with `--config {DEFAULT}` it is a PROMPT"
        raise specrouter.RequestError("PROMPT", f"is missing: {asks}")
    sampling_params(arguments)
    speculation = _speculation(arguments)
    times_ms = _given(arguments, _TIMES)
    asked = read_asked(arguments)
    config = _for_one_request(asked.config, arguments)
    joined(arguments.slo_class, times_ms, slos_by_class(config.slo_classes, None), _SLO_OPTIONS)
    asked.check_sources()
    output: specrouter.RequestOutput | None = None
    with naming(asked.arguments), Progress() as progress:
        started = specrouter.ChainRouter.from_config(config, ShownLoad(progress))
    with started as router:
        params = sampling_params(arguments, router.sampling_defaults)
        slo = joined(arguments.slo_class, times_ms, router.slo_classes, _SLO_OPTIONS)
        for delta in router.stream(arguments.prompt, params, speculation, slo):
            print(delta.text, end="", flush=True)
            output = delta.output
    print(flush=True)
    assert output is not None, "the last delta has it"
    print(figures(output), file=sys.stderr)
    if output.error is not None:
        print(f"specrouter: generation failed: {output.error}", file=sys.stderr)
        return 1
    return 0


def _for_one_request(config: RouterConfig, arguments: argparse.Namespace) -> RouterConfig:
    """Reduce the configuration to the models of the request. Raises `ConfigError`."""
    from specrouter.config import check_chain

    if arguments.no_speculation:
        change: dict[str, Any] = {"policy": "target-only", "chain": None}
    elif arguments.chain is not None:
        change = {"policy": "static", "chain": arguments.chain}
    else:
        return config
    scheduler = config.scheduler.model_copy(update=change)
    config = config.model_copy(update={"scheduler": scheduler})
    with naming({"scheduler.chain": "--chain"}):
        check_chain(config)
    return config


def _given(arguments: argparse.Namespace, names: Iterable[str]) -> dict[str, Any]:
    values = {name: getattr(arguments, name) for name in names}
    return {name: value for name, value in values.items() if value is not None}


def sampling_params(
    arguments: argparse.Namespace, defaults: Mapping[str, Any] = MappingProxyType({})
) -> SamplingParams:
    """Return the parameters from the arguments of `add_sampling`. Raises `RequestError`."""
    from specrouter import SamplingParams

    names = ("max_new_tokens", "temperature", "top_k", "top_p", "seed")
    given = {**defaults, **_given(arguments, names)}
    return SamplingParams(stop=tuple(arguments.stop), **given)


def _speculation(arguments: argparse.Namespace) -> Speculation | Literal["off"] | None:
    from specrouter import RequestError, Speculation

    shape = _given(arguments, _SHAPE)
    if arguments.no_speculation:
        for name in shape:
            raise RequestError(f"--{name}", "means nothing with --no-speculation")
        return "off"
    if arguments.chain is None and not shape:
        return None
    return Speculation(chain=arguments.chain, **shape)
