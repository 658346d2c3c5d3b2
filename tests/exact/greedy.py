"""Greedy decoding equals `generate` of an unpatched model, however a request is served."""

import sys

from specrouter import SamplingParams
from tests.exact.arguments import make_parser, parse
from tests.exact.array_check import DTYPES, run_array_check


def main(arguments: list[str] | None = None) -> int:
    options = parse(make_parser(__doc__, dtypes=DTYPES), arguments)

    def params_of(index: int) -> SamplingParams:
        return SamplingParams(max_new_tokens=options.new_tokens, ignore_eos=index % 2 == 1)

    return run_array_check("greedy", options, params_of)


if __name__ == "__main__":
    sys.exit(main())
