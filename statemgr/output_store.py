"""OutputStore: earlier outputs by tenant, of a bounded number of tokens, for drafts of later ones.

Contract: what was kept of one tenant is found by that tenant only. Where there is no room left, the
oldest output of the tenant that holds most goes first, so that nobody can push others out by
sending much. To keep an output takes time in proportion to it. A token takes about a third of a
kilobyte.
"""

from collections.abc import Sequence

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
