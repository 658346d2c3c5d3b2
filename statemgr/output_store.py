"""OutputStore: earlier outputs of each tenant, as a source of drafts, in bounded memory.

Contract: only the tenant itself finds its outputs. If there is no room left, the oldest output of
the tenant that holds the most is dropped first, so that no tenant can push others out by sending
much. Keeping an output takes time in proportion to its length. A token takes about a third of a
kilobyte.
"""

from collections.abc import Sequence

from statemgr.suffix_index import SuffixIndex

ORDERS = (4, 16)
_OF_TENANT = 64  # tokens charged for a tenant itself, whose tables take as much memory


class OutputStore:
    """Outputs of all tenants, of at most `tokens` tokens together; 0 keeps nothing."""

    def __init__(self, tokens: int) -> None:
        self._most = tokens
        self._held = 0
        self._tenants: dict[str, SuffixIndex] = {}  # the least recently kept first

    def __len__(self) -> int:
        """Return the number of tokens that are kept."""
        return self._held

    def of(self, tenant: str) -> SuffixIndex | None:
        return self._tenants.get(tenant)

    def keep(self, tenant: str, tokens: Sequence[int]) -> None:
        """Keep an output of a tenant, or its end if there is no room for all of it.

        An output that is too short to be found is not kept.
        """
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
        """Drop the oldest output of the tenant that holds the most.

        Of equal tenants it is the one whose last output is the oldest.
        """
        tenant = max(self._tenants, key=lambda name: len(self._tenants[name]))
        index = self._tenants[tenant]
        before = len(index)
        index.drop_text()
        self._held -= before - len(index)
        if not len(index):
            del self._tenants[tenant]
            self._held -= _OF_TENANT
