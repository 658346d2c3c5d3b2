"""Greedy decoding equals an unpatched model's, however a request is served.

The references of plain requests come from `generate`. As many have penalties, biases, bans and
least lengths, and a quarter of all have structures; theirs are decoded step by step.
"""

import sys

from checks.exact.arguments import parse
from checks.exact.array_check import DTYPES, run_array_check
from checks.exact.settings import edits, number_among_plain, structure
from specrouter import SamplingParams


def greedy_params(index: int, new_tokens: int) -> SamplingParams:
    """The parameters of the request with this index: plain ones, and all edits in turn."""
    form, (turn, is_edited) = structure(index), divmod(number_among_plain(index), 2)
    return SamplingParams(
        max_new_tokens=new_tokens,
        ignore_eos=turn % 2 == 1,
        structure=form,
        **(edits(turn, new_tokens) if is_edited and form is None else {}),
    )


def main(arguments: list[str] | None = None) -> int:
    options = parse(__doc__, arguments, DTYPES)
    return run_array_check("greedy", options, lambda i: greedy_params(i, options.new_tokens))


if __name__ == "__main__":
    sys.exit(main())
