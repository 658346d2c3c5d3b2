"""`specrouter verify`: computes the text of a receipt again, and compares the two."""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specrouter.cli.arguments import Commands

if TYPE_CHECKING:
    from specrouter.request.receipt import Receipt, ServedModel
    from specrouter.router import ChainRouter

_DIFFERS = 1
_BY_ITSELF = ("eos", "stop", "length")  # finish reasons of texts that were not interrupted


def add_verify(commands: Commands) -> None:
    parser = commands.add_parser(
        "verify",
        help="compute the text of a receipt again, and say whether it is the same to the bit",
        description="A receipt is what an answer holds that was asked for with `receipt: true`. "
        "The target computes the text alone, without drafts. Exit code 0: the same tokens, by "
        "logits of the same bits; 1: not, or other files.",
    )
    parser.add_argument(
        "receipt", metavar="RECEIPT.json", help="a receipt, or an answer with one; -: stdin"
    )
    parser.add_argument(
        "target", nargs="?", metavar="TARGET",
        help="the model, as serve has it, where it is not where the receipt says",
    )  # fmt: skip
    parser.set_defaults(run=_verify, log_level=logging.WARNING)


def _verify(arguments: argparse.Namespace) -> int:
    """Verify the receipt, and return the exit code. Raises `ConfigError`, `RequestError`."""
    import specrouter
    from specrouter.progress import Progress, ShownLoad
    from specrouter.request.receipt import first_difference

    receipt = _read(arguments.receipt)
    config = _config(receipt, arguments.target)
    with Progress() as progress:
        router = specrouter.ChainRouter.from_config(config, ShownLoad(progress))
    with router:
        again = _again(router, receipt)
    for line in _other_model(receipt.served, again.served):
        print(f"note: {line}", file=sys.stderr)
    if receipt.served.files != again.served.files:
        changed = sorted(dict(receipt.served.files.items() ^ again.served.files.items()))
        print(f"other files: {', '.join(changed)}: the text cannot be compared")
        return _DIFFERS
    difference = first_difference(receipt, again)
    if difference is not None:
        print(f"not equal: {difference}")
        return _DIFFERS
    print(f"equal: {len(receipt.token_ids)} tokens, and the bits of their logits")
    return 0


def _read(path: str) -> Receipt:
    import json

    from specrouter.request.params import RequestError
    from specrouter.request.receipt import Receipt

    try:
        text = sys.stdin.read() if path == "-" else Path(path).read_text(encoding="utf-8")
        found = json.loads(text)
    except (OSError, ValueError) as error:
        raise RequestError("RECEIPT", f"cannot read {path}: {error}") from error
    if isinstance(found, dict) and isinstance(found.get("choices"), list):
        choices = found["choices"]
        if len(choices) > 1:
            reason = f"{path} has {len(choices)} choices: give the receipt of one of them"
            raise RequestError("RECEIPT", reason)
        found = choices[0] if choices else None
    if isinstance(found, dict) and "served" not in found:  # an answer
        found = found.get("receipt")
    if not isinstance(found, dict):
        raise RequestError("RECEIPT", f"{path} has no receipt: ask with `receipt: true`")
    return Receipt.read(json.dumps(found))


def _config(receipt: Receipt, target: str | None) -> dict[str, Any]:
    """Return a configuration of the receipt's target alone. Raises `ConfigError`."""
    from specrouter.request.receipt import OF_NUMBERS, OF_THE_POOL
    from specrouter.target import checked_source

    served = receipt.served
    # A receipt is not trusted: none of its settings may run code.
    settings = {name: one for name, one in served.settings.items() if name in OF_NUMBERS}
    of_the_pool = {name: one for name, one in served.settings.items() if name in OF_THE_POOL}
    argument = "receipt.served.source" if target is None else "TARGET"
    source = checked_source(target or served.source, argument)
    tokens = len(receipt.prompt_token_ids) + receipt.sampling().max_new_tokens
    return {
        "pool": {
            **of_the_pool,
            "models": [{**settings, "name": "target", "source": source}],
            "target": "target",
        },
        "scheduler": {"policy": "target-only"},
        "engine": {"max_model_len": max(2, tokens)},
    }


def _again(router: ChainRouter, receipt: Receipt) -> Receipt:
    """Return the receipt as computed here. Raises `RequestError`."""
    from specrouter.request.params import RequestError

    params = receipt.sampling()
    if receipt.finish_reason not in _BY_ITSELF:  # interrupted: compute as many tokens
        least = min(params.min_tokens, len(receipt.token_ids))
        params = replace(params, max_new_tokens=len(receipt.token_ids), min_tokens=least)
    # Each sample of a prompt has a random stream of its own.
    params = replace(params, n=receipt.sample + 1)
    output = router.generate(list(receipt.prompt_token_ids), params)[-1]
    if output.receipt is None or output.error is not None:
        raise RequestError("receipt", f"cannot be computed: {output.error}")
    return output.receipt


def _other_model(before: ServedModel, now: ServedModel) -> Iterator[str]:
    """Yield differences, other than of files, that bits may depend on."""
    if before.settings != now.settings:
        yield f"settings were {before.settings}, and are {now.settings}"
    if before.arithmetic != now.arithmetic:
        yield f"arithmetic was {', '.join(before.arithmetic)}; it is {', '.join(now.arithmetic)}"
