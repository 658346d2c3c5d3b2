"""SentPrompts: which prompts a replica has been sent, to guess what its prefix cache holds.

Contract: a guess, by what this router has sent; the replica's cache may have forgotten more, or
know prompts from elsewhere. Prompts count in whole blocks, as caches keep them, and only for
requests of the same salt. Bounded: as many blocks as the replica's KV memory has, the least
recently sent ones are forgotten. Belongs to one event loop.
"""

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Sequence

BLOCK_TOKENS = 128  # of the KV memory's blocks


def block_keys(tokens: Sequence[int], salt: str | None) -> tuple[bytes, ...]:
    """One for each whole block of a prompt, which stands for it and all blocks before it."""
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
        """Of a prompt's beginning that was sent there."""
        known = next((at for at, key in enumerate(keys) if key not in self._sent), len(keys))
        return known * BLOCK_TOKENS

    def note(self, keys: Sequence[bytes], capacity_tokens: int) -> None:
        """A prompt was sent; `capacity_tokens`: of the replica's KV memory."""
        for key in keys:
            self._sent[key] = None
            self._sent.move_to_end(key)
        while len(self._sent) > capacity_tokens // BLOCK_TOKENS:
            self._sent.popitem(last=False)
