"""SuffixIndex: earlier occurrences of the end of a text, in texts of any length.

Contract: texts are appended token by token and the oldest ones are dropped, both in amortised
constant time and with memory in proportion to what is kept. A look-up finds the latest occurrences
of the last tokens of a context, each with the whole length that it shares with the context.

A suffix automaton would find the longest match in one walk, but nothing can be dropped from it, and
its states take several times the memory. Here contexts of a few fixed orders are hashed.
Occurrences of the longest order that has any are compared with the context, so that the length of a
match is exact. The longest match is missed only if its last `orders[-1]` tokens have occurred more
than `MAX_MATCHES` times since.
Sources: SuffixDecoding (Oliaro et al., arXiv 2411.04975) for what is looked up; Saxena, prompt
lookup decoding, for the hashed contexts.
"""

from array import array
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

MAX_MATCHES = 16  # per look-up
END = -1  # follows the last token of a text that has ended
_NOWHERE = -1


class Match(NamedTuple):
    """An occurrence of the end of a context.

    Attributes:
        place: place of the token that followed.
        length: tokens before it that the context shares.
    """

    place: int
    length: int


class SuffixIndex:
    """Index of texts by contexts, whose lengths are `orders`, rising."""

    def __init__(self, orders: Sequence[int] = (4, 16)) -> None:
        assert list(orders) == sorted(set(orders)), "orders rise"
        self._orders = tuple(orders)
        self._tokens = array("i")  # of all texts that are kept; each but the last ends with END
        self._base = 0  # place of the first of them
        self._starts = deque([0])  # places where texts begin
        # By order: hash of a context -> the latest place after it; and for each place the previous
        # place with the same hash.
        self._latest: list[dict[int, int]] = [{} for _ in orders]
        self._earlier = [array("q") for _ in orders]

    def __len__(self) -> int:
        """Return the number of tokens that are kept, ends of texts included."""
        return self._base + len(self._tokens) - self._starts[0]

    def token(self, place: int) -> int:
        """Return the token at the place of a match, or `END`."""
        return self._tokens[place - self._base]

    def further(self, match: Match, token: int) -> Match | None:
        """Return the match after one more token; None if its text differs or ends there."""
        at = match.place - self._base
        if self._tokens[at] != token or at + 1 == len(self._tokens) or self._tokens[at + 1] == END:
            return None
        return Match(match.place + 1, match.length + 1)

    def tail(self, count: int) -> "array[int]":
        """Return the last tokens of the current text, at most `count`."""
        end = len(self._tokens)
        return self._tokens[max(self._starts[-1] - self._base, end - count) : end]

    def append(self, tokens: Sequence[int]) -> None:
        """Append tokens to the current text."""
        old = len(self._tokens)
        self._tokens.extend(tokens)
        start = self._starts[-1] - self._base
        for order, latest, earlier in zip(self._orders, self._latest, self._earlier, strict=True):
            earlier.extend([_NOWHERE] * len(tokens))
            # Contexts are entered with the next token: one without it would match itself.
            for at in range(max(old, start + order), len(self._tokens)):
                key = self._key(at, order)
                earlier[at] = latest.get(key, _NOWHERE)
                latest[key] = self._base + at

    def end_text(self) -> None:
        """End the current text and begin another one; no match crosses its beginning."""
        self.append([END])
        self._starts.append(self._base + len(self._tokens))

    def drop_text(self) -> None:
        """Drop the oldest text, which must not be the current one."""
        assert len(self._starts) > 1, "the text goes on"
        first, after = self._starts.popleft(), self._starts[0]
        for order, latest in zip(self._orders, self._latest, strict=True):
            for place in range(first + order, after):
                key = self._key(place - self._base, order)
                if latest[key] == place:  # no later text has the context
                    del latest[key]
        dead = after - self._base
        if 2 * dead > len(self._tokens):  # so that a token is moved at most once on average
            for kept in (self._tokens, *self._earlier):
                del kept[:dead]
            self._base = after

    def matches(self, context: "array[int]") -> list[Match]:
        """Return the latest occurrences of the context's end, the most recent first.

        They are of the longest order that has any, at most `MAX_MATCHES`. None is followed by the
        end of a text.
        """
        for level in reversed(range(len(self._orders))):
            found = self._matches(context, level)
            if found:
                return found
        return []

    def _matches(self, context: "array[int]", level: int) -> list[Match]:
        order, found = self._orders[level], list[Match]()
        if len(context) < order:
            return found
        place = self._latest[level].get(hash(context[-order:].tobytes()), _NOWHERE)
        for _ in range(MAX_MATCHES):
            if place < self._starts[0]:  # no place, or one in a text that was dropped
                break
            length = self._shared(context, place)
            if length >= order and self.token(place) != END:  # not a hash collision
                found.append(Match(place, length))
            place = self._earlier[level][place - self._base]
        return found

    def _shared(self, context: "array[int]", place: int) -> int:
        """Return how many tokens before a place are the last ones of the context.

        The search doubles the length, then halves the interval, and compares whole slices.
        """
        most = min(len(context), place - self._starts[0])
        end, at = len(context), place - self._base

        def is_shared(length: int) -> bool:
            return context[end - length :] == self._tokens[at - length : at]

        low, step = 0, 1
        while low + step <= most and is_shared(low + step):
            low, step = low + step, 2 * step
        high = min(low + step, most + 1)  # the first length that may not be shared
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if is_shared(middle) else (low, middle)
        return low

    def _key(self, at: int, order: int) -> int:
        return hash(self._tokens[at - order : at].tobytes())
