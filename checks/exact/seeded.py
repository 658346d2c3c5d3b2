"""One seed gives the same tokens however a request is served, and those of the oracle.

Every request of an arrangement has other sampling parameters than its neighbours, and some have
structures: see `checks.exact.settings`. That the tokens are also distributed as they should be is
checked by `checks.exact.distribution`.
"""

import sys

from checks.exact.arguments import parse
from checks.exact.array_check import DTYPES, run_array_check
from checks.exact.settings import COUNT, edits, number_among_plain, structure, warpers
from specrouter import SamplingParams


def seeded_params(index: int, new_tokens: int) -> SamplingParams:
    """The parameters of the request with this index: all settings in turn, each its own seed."""
    form, turn = structure(index), number_among_plain(index)
    return SamplingParams(
        max_new_tokens=new_tokens,
        seed=1000 + index,
        ignore_eos=turn // COUNT % 2 == 1,
        structure=form,
        **warpers(turn),
        **(edits(turn, new_tokens) if form is None else {}),
    )


def main(arguments: list[str] | None = None) -> int:
    options = parse(__doc__, arguments, DTYPES)
    return run_array_check("seeded", options, lambda i: seeded_params(i, options.new_tokens))


if __name__ == "__main__":
    sys.exit(main())
