"""OutputStore: earlier outputs by tenant, of a bounded number of tokens, for drafts of later ones.

Contract: what was kept of one tenant is found by that tenant only. Where there is no room left, the
oldest output of the tenant that holds most goes first, so that nobody can push others out by
sending much. To keep an output takes time in proportion to it. A token takes about a third of a
kilobyte.

It can be written to a file and read back, so that a service that starts again knows what it knew.
Only tokens and names of tenants are written; whoever reads the file reads outputs.
"""

import json
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from statemgr.suffix_index import SuffixIndex

ORDERS = (4, 16)
_OF_TENANT = 64  # tokens that count for a tenant itself: its tables take as much memory


class OutputStore:
    """Args: `tokens`: of all tenants together; 0 keeps nothing."""

    def __init__(self, tokens: int) -> None:
        self._most = tokens
        self._held = 0
        self._tenants: dict[str, SuffixIndex] = {}  # the least recently kept first

    def __len__(self) -> int:
        """Tokens that are kept."""
        return self._held

    @property
    def tenants(self) -> int:
        return len(self._tenants)

    def of(self, tenant: str) -> SuffixIndex | None:
        return self._tenants.get(tenant)

    def keep(self, tenant: str, tokens: Sequence[int]) -> None:
        """An output, or its end if all of it has no room. One that is too short to find is none."""
        room = self._most - _OF_TENANT - 1
        if len(tokens) <= ORDERS[0] or room <= ORDERS[0]:
            return
        index = self._tenants.pop(tenant, None)
        if index is None:
            index = SuffixIndex(ORDERS)
            self._held += _OF_TENANT
        self._tenants[tenant] = index
        before = len(index)
        index.append(tokens[-room:])
        index.end_text()
        self._held += len(index) - before
        while self._held > self._most:
            self._drop()

    def _drop(self) -> None:
        """The oldest output of the tenant that holds most; of equals, who kept nothing for the
        longest time."""
        tenant = max(self._tenants, key=lambda name: len(self._tenants[name]))
        index = self._tenants[tenant]
        before = len(index)
        index.drop_text()
        self._held -= before - len(index)
        if not len(index):
            del self._tenants[tenant]
            self._held -= _OF_TENANT

    def save(self, file: Path, fingerprint: str) -> None:
        """Replaces the file at once, readable by its owner only. Raises `OSError`.

        Args:
            fingerprint: of what tokens mean; the file is read back for the same one only.
        """
        outputs = {
            tenant: [index.text(at).tolist() for at in range(index.texts - 1)]
            for tenant, index in self._tenants.items()
        }
        beside = file.with_name(f"{file.name}.{os.getpid()}")
        descriptor = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "w", encoding="utf-8") as opened:
            json.dump({"fingerprint": fingerprint, "outputs": outputs}, opened)
        beside.replace(file)

    def load(self, file: Path, fingerprint: str, vocab_size: int) -> None:
        """Keeps what is in a file.

        Raises:
            OSError: it cannot be read.
            ValueError: it is no such file, or of other tokens.
        """
        kept = json.loads(file.read_text(encoding="utf-8"))
        if not isinstance(kept, dict) or kept.get("fingerprint") != fingerprint:
            raise ValueError("it is not of this tokenizer")
        for tenant, outputs in _checked(kept.get("outputs"), vocab_size).items():
            for tokens in outputs:
                self.keep(tenant, tokens)


def _checked(outputs: object, vocab_size: int) -> dict[str, list[list[int]]]:
    if not isinstance(outputs, dict):
        raise ValueError("it has no outputs")
    for tenant, texts in outputs.items():
        for tokens in texts:
            ids = np.array(tokens)
            whole = ids.ndim == 1 and (ids.dtype.kind == "i" or not len(ids))
            if not whole or ((ids < 0) | (ids >= vocab_size)).any():
                raise ValueError(f"an output of {tenant!r} has what is no token")
    return outputs
