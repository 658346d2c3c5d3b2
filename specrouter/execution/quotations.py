"""Drafts of a text drafter, which replace a chain's draft or stand alone.

Texts are looked up in every cycle, with any chain. With a drafting chain, a row takes the tokens of
the text drafter if they promise more accepted tokens than the chain was planned for, and at least
one; the chain's models then do not draft for this row. Where the target would decode alone, as many
tokens are verified as pay.

The worth of a token is the acceptance of earlier tokens with such a probability. The first token of
each look-up teaches, verified or not: the next token of the text shows whether it was right.
"""

from collections import Counter, defaultdict
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from processors import DraftRequest, DraftResult, TokenTree
from processors.grammar import TokenGrammar, is_legal
from specrouter.cycle import ChainGroup, DraftShape, Floats, Ints
from specrouter.execution.drafter import Drafter, Quoted
from specrouter.execution.group_draft import GroupDraft
from specrouter.execution.runtime import Runtime
from specrouter.profile.snapshot import TreeKey

# (n, k): after n cycles in which nothing paid for a row, one cycle of k looks up its text.
_EVERY = ((48, 8), (12, 4), (4, 2), (0, 1))
_AT_ONCE = 16  # tokens in a batch of learning
_LEAST = 0.05  # lowest product of probabilities in a draft whose nodes a selector picks


class _Found(NamedTuple):
    """The first token of a look-up, and its place in the row's text."""

    key: TreeKey
    place: int
    token: int
    probability: float


class Quotations:
    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._rows = runtime.rows
        self._manager = runtime.manager
        self._vain = Counter[int]()  # consecutive cycles in which nothing paid, by row
        self._found: dict[int, _Found] = {}  # by row
        self._seen = defaultdict[TreeKey, list[tuple[float, bool]]](list)

    def forget(self, row: int) -> None:
        """Forget a row whose request has ended."""
        self._vain.pop(row, None)
        self._found.pop(row, None)

    def instead(self, group: ChainGroup) -> tuple[list[GroupDraft], ChainGroup]:
        """Return the draft of the rows that quote, if any, and the group without them."""
        quoted: GroupDraft | None = None
        with self._runtime.faults.part("drafting"):
            quoted = self._better(group)
        if quoted is None:
            return [], group
        if len(quoted.rows) == len(group.rows):
            return [quoted], replace(group, rows=group.rows[:0])
        return [quoted], replace(group, rows=np.setdiff1d(group.rows, quoted.rows))

    def _better(self, group: ChainGroup) -> GroupDraft | None:
        """Return the draft that is better than the group's own, or None, the usual result."""
        name, planned = group.quotes, group.predicted
        if name is None or name in group.chain or planned is None:
            return None
        drafter = self._runtime.drafters[name]
        if drafter.reach is None:
            return None
        positions = self._rows.output_positions(group.rows).tolist()
        limits = self._rows.remaining(group.rows) - 1  # a row's last token is the target's own
        ms, paths, worths = group.quoted_ms, list[list[Quoted]](), list[list[float]]()
        # A token with a lower chance costs more time than it saves.
        least = _LEAST if ms is None else group.requests * float((ms[2] - ms[1]) / ms[0])
        for row, position, limit in zip(
            group.rows.tolist(), positions, limits.tolist(), strict=True
        ):
            most = min(drafter.reach, limit)
            is_due = most > 0 and (ms is None or self._is_due(row))
            key = (name,), group.chain[-1], self._rows.is_sampled(row)
            paths.append(self._looked(key, drafter, row, position, most, least) if is_due else [])
            shares = [share for _, share in paths[-1]]
            worths.append(self._runtime.profiler.path_worth(key, shares) if shares else [])
        if ms is None:
            enough = max(1.0, planned.tokens - 1.0)
            counts = [len(one) if sum(one) >= enough else 0 for one in worths]
        else:
            counts = _productive(worths, ms, group.requests)
        if not any(counts):
            return None
        for row, count in zip(group.rows.tolist(), counts, strict=True):
            if count:
                self._vain.pop(row, None)
        counts = self._with_room(group.rows, np.array(counts))
        if not any(counts):
            return None
        return self._draft(group, name, positions, paths, worths, counts)

    def _is_due(self, row: int) -> bool:
        self._vain[row] += 1
        vain = self._vain[row]
        return not vain % next(every for some, every in _EVERY if vain >= some)

    def _looked(
        self, key: TreeKey, drafter: Drafter, row: int, position: int, most: int, least: float
    ) -> list[Quoted]:
        """Learn from the row's last look-up; return a new one, as far as its grammar allows."""
        text, last = self._manager.committed(row), self._found.pop(row, None)
        if last is not None and last.place < len(text):
            self._learn(last, int(text[last.place]) == last.token)
        path = drafter.quote(row, position, most, least)
        grammar = self._runtime.sampler.grammars.get(row)
        if grammar is not None:
            path = _allowed(path, grammar)
        if path:
            self._found[row] = _Found(key, len(text), *path[0])
        return path

    def _learn(self, found: _Found, is_right: bool) -> None:
        seen = self._seen[found.key]
        seen.append((found.probability, is_right))
        if len(seen) >= _AT_ONCE:
            stated, accepted = (np.array(one)[:, None] for one in zip(*seen, strict=True))
            seen.clear()
            self._runtime.profiler.record_choices(found.key, stated, accepted)

    def _with_room(self, rows: Ints, counts: Ints) -> list[int]:
        """Return the numbers of tokens that fit in KV memory."""
        self._manager.grow(rows, self._manager.counts[rows] + counts, partly=True)
        fitting: list[int] = np.minimum(counts, self._manager.room(rows)).tolist()
        return fitting

    def _draft(
        self,
        group: ChainGroup,
        name: str,
        positions: list[int],
        paths: list[list[Quoted]],
        worths: list[list[float]],
        counts: list[int],
    ) -> GroupDraft:
        """Return a draft of the first `counts[i]` tokens of each row's path, if there are any."""
        chosen = [index for index, count in enumerate(counts) if count]
        rows, sizes = group.rows[chosen], np.array([counts[index] for index in chosen])
        tokens, shares = np.zeros((2, len(rows), int(sizes.max())))
        worth = np.zeros(tokens.shape)
        for line, index in enumerate(chosen):
            few = slice(counts[index])
            tokens[line, few], shares[line, few] = zip(*paths[index][few], strict=True)
            worth[line, few] = worths[index][few]
        with np.errstate(divide="ignore"):
            log_probs = np.cumsum(np.log(shares), axis=1)
        tree = TokenTree.path(rows, tokens.astype(np.int64), sizes, log_probs)
        own = replace(
            group,
            chain=(name, group.chain[-1]),
            shape=DraftShape(1),
            rows=rows,
            whole=group.quoted_ms is not None,
            branching=None,
            predicted=None,
        )
        no_rows = rows[:0]
        draft = GroupDraft(
            group=own,
            request=DraftRequest(
                rows=rows,
                output_positions=np.array([positions[index] for index in chosen]),
                depths=sizes,
            ),
            sampled=self._rows.sampled(rows),
            cut_rows=no_rows,
            behind_rows=no_rows,
        )
        draft.worth = worth
        draft.result, draft.is_quoted = DraftResult.without_logits(tree), True
        draft.used.append(name)
        return draft


def _allowed(path: list[Quoted], grammar: TokenGrammar) -> list[Quoted]:
    """Return the beginning of a path that a grammar allows."""
    if not grammar.binds_drafts:
        return path
    tokens = tuple(token for token, _ in path)
    count = next((at for at in range(len(path)) if not is_legal(grammar, tokens[: at + 1])), None)
    return path[:count]


def _productive(worths: list[list[float]], ms: Floats, requests: int) -> list[int]:
    """Return the number of tokens of each row's path that brings the most tokens per millisecond.

    The tokens and the time are those of all `requests` together; `ms` [K + 1] is the time by the
    number of tokens.
    """
    counts, best = [0] * len(worths), requests / float(ms[0])
    found, tokens = list(counts), float(requests)
    nodes = sorted(
        ((one, row) for row, path in enumerate(worths) for one in path), key=lambda node: -node[0]
    )
    for count, (gain, row) in enumerate(nodes[: len(ms) - 1], start=1):
        tokens += gain  # worths fall along a path, so a row's earlier tokens come first
        found[row] += 1
        if tokens / float(ms[count]) > best:
            best, counts = tokens / float(ms[count]), list(found)
    return counts
