"""`specrouter generate`: continues one prompt on the terminal."""

from __future__ import annotations

import argparse
import logging

from specrouter.cli.arguments import Commands, add_config
from specrouter.cli.target import add_fresh_times


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
    _add_slo(parser)
    add_fresh_times(parser)
    parser.set_defaults(run=_generate, log_level=logging.WARNING)


def _add_slo(parser: argparse.ArgumentParser) -> None:
    times = {
        "tpot": "of a token after the first",
        "ttft": "to the first token",
        "e2e": "to the last token",
    }
    for name, which in times.items():
        told = f"objective: time {which}"
        parser.add_argument(f"--slo-{name}-ms", type=float, metavar="MS", help=told)
    parser.add_argument("--slo-class", metavar="NAME", help="objectives of the config's class")


def _generate(arguments: argparse.Namespace) -> int:
    from specrouter.cli.generate_text import generate_text

    return generate_text(arguments)


def _chain(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(","))
