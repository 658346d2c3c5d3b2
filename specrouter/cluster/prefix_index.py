"""SentPrompts: prompts that a replica was sent, as a guess of its prefix cache.

Contract: a guess from what this router has sent; the replica's cache may have evicted more, or hold
prompts of other origin. Prompts count in whole blocks, as in caches, and only for requests of the
same salt. Bounded by the number of blocks in the replica's KV memory: the least recently sent ones
are dropped. Belongs to one event loop.
"""

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Sequence

BLOCK_TOKENS = 128  # of a block here: four blocks of KV memory


def block_keys(tokens: Sequence[int], salt: str | None) -> tuple[bytes, ...]:
    """Return a key for each whole block of a prompt, which covers it and all blocks before it."""
    keys = []
    digest = hashlib.blake2b((salt or "").encode(), digest_size=16)
    for end in range(BLOCK_TOKENS, len(tokens) + 1, BLOCK_TOKENS):
        digest.update(array("q", tokens[end - BLOCK_TOKENS : end]).tobytes())
        keys.append(digest.digest())
    return tuple(keys)


class SentPrompts:
    def __init__(self) -> None:
        self._sent = OrderedDict[bytes, None]()

    def matched_tokens(self, keys: Sequence[bytes]) -> int:
        """Return how many tokens at the prompt's beginning were sent there before."""
        known = next((at for at, key in enumerate(keys) if key not in self._sent), len(keys))
        return known * BLOCK_TOKENS

    def note(self, keys: Sequence[bytes], capacity_tokens: int) -> None:
        """Note a sent prompt; `capacity_tokens` is the size of the replica's KV memory."""
        for key in keys:
            self._sent[key] = None
            self._sent.move_to_end(key)
        while len(self._sent) > capacity_tokens // BLOCK_TOKENS:
            self._sent.popitem(last=False)
