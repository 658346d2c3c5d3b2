"""`specrouter chat`: a conversation on the terminal.

Contract: answers go to stdout, everything else to stderr. The part of a stopped answer that has
been printed stays in the conversation.
"""

from __future__ import annotations

import argparse
import logging
import sys
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING

from specrouter.cli.arguments import Commands
from specrouter.cli.generate import add_sampling, sampling_params
from specrouter.cli.target import add_target, read_asked
from specrouter.target import naming

if TYPE_CHECKING:
    from specrouter.router import ChainRouter

_LONGEST = 1024  # tokens of an answer by default, so that one without an end leaves room for others
_KEYS = "Ctrl-C stops an answer, /reset begins anew, Ctrl-D ends"


def add_chat(commands: Commands) -> None:
    parser = commands.add_parser(
        "chat", help="talk to a model on the terminal", description=f"{_KEYS}."
    )
    add_target(parser)
    parser.add_argument("--system", metavar="TEXT", help="system message of the conversation")
    add_sampling(parser)
    parser.set_defaults(run=_chat, log_level=logging.WARNING)


def _chat(arguments: argparse.Namespace) -> int:
    """Run the conversation and return the exit code. Raises `ConfigError`, `RequestError`."""
    from specrouter.progress import Progress, ShownLoad

    sampling_params(arguments)  # errors come before PyTorch is imported
    asked = read_asked(arguments)
    asked.check_sources()
    with naming(asked.arguments), Progress("starting") as progress:
        from specrouter.router import ChainRouter

        started = ChainRouter.from_config(asked.config, ShownLoad(progress))
    with started as router:
        _Chat(router, arguments).run()
    return 0


class _Chat:
    def __init__(self, router: ChainRouter, arguments: argparse.Namespace) -> None:
        from specrouter.request.chat_template import DEFAULT_TEMPLATE

        self._router, system = router, arguments.system
        self._template = router.chat_template
        self._params = sampling_params(arguments, router.sampling_defaults)
        self._is_bounded = arguments.max_new_tokens is not None
        self._before = [] if system is None else [{"role": "system", "content": system}]
        self._messages = [*self._before]
        if self._template.source == DEFAULT_TEMPLATE:
            _print(
                f"{router.pool.target} has no chat template: it reads a transcript in plain text "
                "(--set server.chat_template=FILE gives it one)"
            )

    def run(self) -> None:
        with suppress(ImportError):
            import readline  # noqa: F401 (gives input() a history and editing keys)
        _print(f"{self._router.pool.target}: {_KEYS}")
        while (text := _read()) is not None:
            if text.strip() == "/reset":
                self._messages = [*self._before]
            elif text.strip():
                self._answer(text)

    def _answer(self, text: str) -> None:
        from specrouter.notebook import speed
        from specrouter.request.params import RequestError

        messages = [*self._messages, {"role": "user", "content": text}]
        answer, output = "", None
        try:
            prompt = self._template.prompt(messages)
            params = self._params
            if not self._is_bounded:
                room = self._router.limits.max_tokens - len(prompt)
                params = replace(params, max_new_tokens=max(1, min(room, _LONGEST)))
            for delta in self._router.stream(prompt, params):
                print(delta.text, end="", flush=True)
                answer, output = answer + delta.text, delta.output
        except KeyboardInterrupt:
            pass
        except RequestError as error:
            _print(f"{error} (/reset begins anew)")
            return
        print(flush=True)
        if answer:
            self._messages = [*messages, {"role": "assistant", "content": answer}]
        _print("stopped" if output is None else output.error or speed(output))


def _read() -> str | None:
    """Return a line of input, or None at its end."""
    while True:
        try:
            return input("> " if sys.stdin.isatty() else "")
        except EOFError:
            print(flush=True)
            return None
        except KeyboardInterrupt:  # discard the line
            print(flush=True)


def _print(text: str) -> None:
    is_dim = sys.stderr.isatty()
    print(f"\033[2m{text}\033[0m" if is_dim else text, file=sys.stderr, flush=True)
