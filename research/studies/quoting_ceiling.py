"""What quotations could bring on recorded outputs, counted without running a model.

    python -m research.studies.quoting_ceiling [--config FILE] [--prompts FILE ...] [--sure 0.98]

Each recorded output is decoded as the engine would: a pass of the target accepts what of a draft is
the recorded text, and adds a token. The draft is what the suffix table quotes where that promises
more, else that of an imagined drafter, which knows of each of its tokens whether it is sure of it,
and is right as often as that says. Shown are tokens per pass and per second with

- quotations alone;
- quotations beside the drafter, as the engine has them;
- the same, and the drafter's drafts go on with what is quoted after them.

Costs in ms are those of a pass, of its nodes beyond five, and of a drafted token. Paths that are
wrong go on with nothing here, which costs them nothing: the last line is a bound.
"""

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from modelpool import ModelPool
from specrouter.bench.agent_workload import agent_workload
from specrouter.bench.conditions import request_limit
from specrouter.bench.prompts import BenchPrompt
from specrouter.bench.trajectories import load_trajectories, tokenize_trajectories
from specrouter.cli.arguments import default_config
from specrouter.config import RouterConfig
from specrouter.profile.calibration import Calibration
from specrouter.request.params import MAX_TREE_TOKENS
from statemgr import SuffixTable

_DEPTH = 3  # tokens that the drafter drafts
_FREE_NODES = 5  # that a pass takes no longer for
_LEAST = 0.05  # probability of a path that is looked up
_SURE_SHARE = 0.6  # of the drafter's tokens


@dataclass(frozen=True)
class Costs:
    pass_ms: float
    node_ms: float
    draft_ms: float
    least: float  # probability of a node that is verified


@dataclass
class Tally:
    tokens: int = 0
    passes: int = 0
    ms: float = 0.0

    def add(self, gained: int, nodes: int, drafted: int, costs: Costs) -> None:
        """A pass that commits `gained` tokens, of so many nodes, of which a drafter made some."""
        self.tokens += gained
        self.passes += 1
        self.ms += costs.pass_ms + costs.node_ms * max(0, nodes - _FREE_NODES)
        self.ms += costs.draft_ms * drafted


@dataclass(frozen=True)
class Drafter:
    """Of one text: how probable it holds each of its tokens, and whether they are right."""

    stated: Sequence[float]
    right: Sequence[bool]

    @classmethod
    def drawn(cls, tokens: int, sure: float, doubtful: float, seed: int) -> "Drafter":
        rng = np.random.default_rng(seed)
        stated = np.where(rng.random(tokens) < _SURE_SHARE, sure, doubtful)
        return cls(stated.tolist(), (rng.random(tokens) < stated).tolist())

    @property
    def promise(self) -> float:
        """Accepted tokens of a draft, in the mean."""
        mean = float(np.mean(self.stated))
        return sum(mean**level for level in range(1, _DEPTH + 1))


class Replay:
    """One recorded output, decoded from its beginning."""

    def __init__(self, one: BenchPrompt, vocab_size: int, known: Calibration, costs: Costs) -> None:
        self._text, self._prompt = list(one.recorded), list(one.token_ids)
        self._table, self._known, self._costs = SuffixTable(vocab_size), known, costs
        self._table.open(0, len(self._prompt))

    def run(self, drafter: Drafter | None, with_tails: bool, tally: Tally) -> None:
        done = 0
        while done < len(self._text):
            committed = np.array(self._prompt + self._text[:done])
            where, left = self._table.end(0, committed), len(self._text) - done - 1
            quoted = list(self._quoted(where, 1.0, done, min(MAX_TREE_TOKENS, left)))
            least = 1.0 if drafter is None else max(1.0, drafter.promise)
            if drafter is None or sum(probable for _, probable in quoted) >= least:
                accepted, nodes = self._verified(quoted)
                tally.add(accepted + 1, nodes, 0, self._costs)
            else:
                accepted, nodes = self._drafted(where, drafter, done, left, with_tails)
                tally.add(accepted + 1, nodes, min(_DEPTH, left), self._costs)
            done += accepted + 1

    def _drafted(
        self, where: object, drafter: Drafter, done: int, left: int, with_tails: bool
    ) -> tuple[int, int]:
        """Accepted tokens and nodes."""
        depth = min(_DEPTH, left)
        right = drafter.right[done : done + depth]
        accepted = next((at for at, is_right in enumerate(right) if not is_right), depth)
        if accepted < depth or not with_tails:
            return accepted, depth
        for token in self._text[done : done + depth]:
            where = self._table.after(0, where, token)  # type: ignore[arg-type]
        probable = float(np.prod(drafter.stated[done : done + depth]))
        tail = list(self._quoted(where, probable, done + depth, left - depth))
        further, nodes = self._verified(tail)
        return accepted + further, depth + nodes

    def _quoted(
        self, where: object, probable: float, done: int, most: int
    ) -> Iterator[tuple[bool, float]]:
        """Of each token on the best path: is the path right up to it, and how probably is it?"""
        is_right = True
        for at in range(done, done + most):
            ids, stated = self._table.predict(0, where)  # type: ignore[arg-type]
            if not len(ids):
                return
            place, first = np.zeros(1, dtype=np.int64), stated[:1]
            probable *= float(self._known.probability(first, place)[0])
            if probable < _LEAST:
                return
            was_right, is_right = is_right, is_right and int(ids[0]) == self._text[at]
            if was_right:
                self._known.record(first, place, np.array([is_right]))
            yield is_right, probable
            where = self._table.after(0, where, int(ids[0]))  # type: ignore[arg-type]

    def _verified(self, path: Sequence[tuple[bool, float]]) -> tuple[int, int]:
        """Accepted tokens and nodes, of those that are worth a place in the pass."""
        kept = [is_right for is_right, probable in path if probable >= self._costs.least]
        return sum(kept), len(kept)


def main(argv: Sequence[str] | None = None) -> None:
    options = _parser().parse_args(argv)
    config = RouterConfig.load(options.config)
    pool = ModelPool.from_config(config.pool)  # reads no weights
    found = load_trajectories(options.prompts) if options.prompts else agent_workload()
    limit = request_limit(config, pool)
    parts = tokenize_trajectories(found, pool.tokenizer, limit, options.new_tokens)
    costs = Costs(options.pass_ms, options.node_ms, options.draft_ms, options.least)
    known, document = Calibration(), {}
    for part, texts in parts.items():  # what quotations are worth is learned first
        tallies = _played(texts[: options.texts], pool.vocab_size, known, costs, options)
        tallies = _played(texts[: options.texts], pool.vocab_size, known, costs, options)
        document[part] = {name: asdict(one) for name, one in tallies.items()}
        for name, one in tallies.items():
            per_pass, per_s = one.tokens / one.passes, 1000 * one.tokens / one.ms
            print(f"{part:8} {name:20} {per_pass:6.2f} tokens/pass {per_s:6.0f} tokens/s")
    print(json.dumps(document))


def _played(
    texts: Sequence[BenchPrompt],
    vocab_size: int,
    known: Calibration,
    costs: Costs,
    options: argparse.Namespace,
) -> dict[str, Tally]:
    tallies = {name: Tally() for name in ("quotations alone", "beside a drafter", "with tails")}
    for number, one in enumerate(texts):
        drafter = Drafter.drawn(len(one.recorded), options.sure, options.doubtful, number)
        for name, tally in tallies.items():
            replay = Replay(one, vocab_size, known, costs)
            own = None if name == "quotations alone" else drafter
            replay.run(own, name == "with tails", tally)
    return tallies


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--config", type=Path, default=default_config(), help="for its tokenizer")
    parser.add_argument("--prompts", type=Path, nargs="+", default=[], help="prompt and output")
    parser.add_argument("--new-tokens", type=int, default=96)
    parser.add_argument("--texts", type=int, default=5, help="of each part")
    parser.add_argument("--sure", type=float, default=0.9, help="of the drafter's tokens, most")
    parser.add_argument("--doubtful", type=float, default=0.3, help="of the others")
    parser.add_argument("--least", type=float, default=0.25, help="of a node that is verified")
    parser.add_argument("--pass-ms", type=float, default=20.0)
    parser.add_argument("--node-ms", type=float, default=1.05)
    parser.add_argument("--draft-ms", type=float, default=0.6)
    return parser


if __name__ == "__main__":
    main()
