"""PrefixIndex: what prompts each replica has been sent, to guess what its prefix cache holds.

Contract: a guess, by what this router has sent; the replica's cache may have forgotten more, or
know prompts from elsewhere. Prompts count in whole blocks, as caches keep them, and only for
requests of the same salt. Bounded: as many blocks of each replica as its KV memory has, the least
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


class PrefixIndex:
    def __init__(self) -> None:
        self._sent: dict[str, OrderedDict[bytes, None]] = {}

    def matched_tokens(self, replica: str, keys: Sequence[bytes]) -> int:
        """Of a prompt's beginning that was sent there."""
        sent = self._sent.get(replica, OrderedDict())
        known = next((at for at, key in enumerate(keys) if key not in sent), len(keys))
        return known * BLOCK_TOKENS

    def note(self, replica: str, keys: Sequence[bytes], capacity_tokens: int) -> None:
        """A prompt was sent; `capacity_tokens`: of the replica's KV memory."""
        sent = self._sent.setdefault(replica, OrderedDict())
        for key in keys:
            sent[key] = None
            sent.move_to_end(key)
        while len(sent) > capacity_tokens // BLOCK_TOKENS:
            sent.popitem(last=False)

    def forget(self, replica: str) -> None:
        """It has begun anew."""
        self._sent.pop(replica, None)
