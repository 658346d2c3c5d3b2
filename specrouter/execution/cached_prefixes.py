"""CachedPrefixes: what requests need not read, since others have read it, or read it now."""

from collections.abc import Mapping

from specrouter.execution.runtime import Runtime
from specrouter.request.spec import RequestSpec
from statemgr import CacheUse, TokenChain


class CachedPrefixes:
    def __init__(self, runtime: Runtime) -> None:
        self._manager = runtime.manager
        self._target = runtime.pool.target
        self._is_on = runtime.settings.prefix_cache

    @property
    def are_kept(self) -> bool:
        """Whether anything is cached that nobody runs with."""
        return self._manager.cached_slots > 0

    def use(self, request: RequestSpec) -> CacheUse:
        """Who wants the log-probabilities of a prompt reads all of it."""
        params = request.params
        if not (self._is_on and params.prefix_cache):
            return CacheUse()
        return CacheUse(params.cache_salt or "", reads=params.prompt_logprobs is None)

    def cached(self, request: RequestSpec, text: TokenChain) -> dict[str, int]:
        """By model: tokens of a request that waits that it would not have to read."""
        return self._manager.cached(text, self.use(request))

    def inherited(self, row: int) -> int:
        """Tokens of a row that the target did not read for it."""
        return self._manager.inherited(row, self._target)

    def follow(self) -> list[int]:
        """Rows take over what others have read since. Returns those that did."""
        return self._manager.follow()

    def waits(self, left: Mapping[int, int]) -> dict[int, int]:
        """By row: another one that is to read, by itself, at least half of what the row has left.

        `left`: by row, tokens before its last one that the target has not read.
        """
        found = {}
        for row, (leader, expected) in self._manager.leaders().items():
            unread = left.get(row, 0)
            gain = expected - (int(self._manager.counts[row]) - 1 - unread)
            if left.get(leader, 0) and unread and 2 * gain >= unread:
                found[row] = leader
        return found
