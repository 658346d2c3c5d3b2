"""What the default routing gains over the target alone, on a released model.

    python -m checks.real.speculation FILE [--draft NAME ...] [--out FILE.jsonl]
        [--temperature 0 1] [--requests 1 4 8] [--kinds prose code sums edits] [--pairs 12]

In one process, in turns: on, off, off, on, with prompts of their own for each pair; the texts must
be equal. Earlier outputs are not quoted, since both turns have the same prompts. The first pair of
a cell is not counted. A cell is the median and the geometric mean of off over on, by time for each
token after the first, with the bootstrap's interval of 95%. Cells that `--out` has are left out, so
that a run which was stopped goes on. Nothing else may run.
"""

import argparse
import itertools
import json
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from checks.exact.report import conditions
from checks.real.prompts import KINDS, texts
from specrouter import LLM, RequestOutput, SamplingParams, Speculation
from specrouter.request.chat_template import ChatTemplate

_DRAWS, _SEED = 2000, 11
_TOKENS = {"edits": 192}  # of an output, and 96 of others
_ON = Speculation(reuse_outputs=False)


@dataclass(frozen=True)
class Cell:
    kind: str
    temperature: float
    requests: int


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="checks.real.speculation", description=__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("--draft", nargs="+", default=["ngram"], metavar="NAME")
    parser.add_argument("--out", type=Path, metavar="FILE.jsonl")
    parser.add_argument("--temperature", type=float, nargs="+", default=[0.0, 1.0])
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 4, 8])
    parser.add_argument("--kinds", nargs="+", default=[*KINDS, "edits"])
    parser.add_argument("--pairs", type=int, default=12)
    given = parser.parse_args(arguments)
    named = {"file": given.file.name, "draft": given.draft}
    known = [] if given.out is None or not given.out.exists() else given.out.read_text().split("\n")
    done = [json.loads(line) for line in known if line]
    cells = itertools.product(given.kinds, given.temperature, given.requests)
    llm = LLM(str(given.file), draft=given.draft, max_requests=max(given.requests))
    for cell in itertools.starmap(Cell, cells):
        head = {**named, **vars(cell)}
        if any(head.items() <= one.items() for one in done):
            continue
        line = json.dumps({**head, **_measured(llm, cell, given.pairs), **conditions()})
        print(line, flush=True)
        if given.out is not None:
            with given.out.open("a") as file:
                file.write(line + "\n")
    llm.close()
    return 0


def _measured(llm: LLM, cell: Cell, pairs: int) -> dict[str, Any]:
    prompts = _prompts(llm, cell.kind)
    ratios, lengths = list[float](), list[float]()
    for number in range(pairs + 1):
        asked = [next(prompts) for _ in range(cell.requests)]
        params = SamplingParams(
            max_new_tokens=_TOKENS.get(cell.kind, 96),
            temperature=cell.temperature,
            seed=number,
            prefix_cache=False,
        )
        on, off, again_off, again_on = (
            llm.router.generate(asked, params, how) for how in (_ON, "off", "off", _ON)
        )
        texts = [[one.token_ids for one in turn] for turn in (on, off, again_off, again_on)]
        assert all(text == texts[0] for text in texts), "drafts have changed a text"
        if number:
            ratios.append((_ms(off) + _ms(again_off)) / (_ms(on) + _ms(again_on)))
            lengths.append(float(np.mean([one.metrics.acceptance_length for one in again_on])))
    drawn = np.random.default_rng(_SEED).choice(np.array(ratios), (_DRAWS, len(ratios)))
    medians = np.median(drawn, axis=1)
    return {
        "median": round(float(np.median(ratios)), 3),
        "interval": [round(float(np.quantile(medians, share)), 3) for share in (0.025, 0.975)],
        "geometric_mean": round(float(np.exp(np.log(ratios).mean())), 3),
        "tokens_a_pass": round(float(np.mean(lengths)), 2),
    }


def _ms(turn: Sequence[RequestOutput]) -> float:
    return sum((one.metrics.e2e_ms or 0.0) - (one.metrics.ttft_ms or 0.0) for one in turn)


def _prompts(llm: LLM, kind: str) -> Iterator[Sequence[int]]:
    """Tokens of prompts, again and again; they are messages where the model has a template."""
    found = texts(kind)
    tokenizer = llm.router.tokenizer
    if not tokenizer.chat_template:
        return itertools.cycle([tokenizer.encode(text) for text in found])
    template = ChatTemplate(tokenizer, None)
    return itertools.cycle([template.prompt([{"role": "user", "content": one}]) for one in found])


if __name__ == "__main__":
    began = time.monotonic()
    code = main()
    print(f"{time.monotonic() - began:.0f} s", file=sys.stderr)
    sys.exit(code)
