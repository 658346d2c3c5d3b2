"""One seed gives the same tokens however a request is served, and those of the oracle.

Every request of an arrangement has other sampling parameters than its neighbours: temperature
0.7, 1.0 or 1.3, with and without top-k 40, with and without top-p 0.9. That the tokens are also
distributed as they should be is checked by `tests.exact.distribution`.
"""

import itertools
import sys

from specrouter import SamplingParams
from tests.exact.arguments import make_parser, parse
from tests.exact.array_check import DTYPES, run_array_check

SETTINGS = tuple(itertools.product((0.7, 1.0, 1.3), (0, 40), (1.0, 0.9)))


def seeded_params(index: int, new_tokens: int) -> SamplingParams:
    """The parameters of the request with this index: all settings in turn, each its own seed."""
    temperature, top_k, top_p = SETTINGS[index % len(SETTINGS)]
    return SamplingParams(
        max_new_tokens=new_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        seed=1000 + index,
        ignore_eos=index // len(SETTINGS) % 2 == 1,
    )


def main(arguments: list[str] | None = None) -> int:
    options = parse(make_parser(__doc__, dtypes=DTYPES), arguments)
    return run_array_check("seeded", options, lambda i: seeded_params(i, options.new_tokens))


if __name__ == "__main__":
    sys.exit(main())
