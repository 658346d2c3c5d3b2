"""Job: a sample from its submission to its end, and the listener that gets its tokens."""

import asyncio
import logging
from collections.abc import Callable

from specrouter.cluster.forwarder import ForwardingContext, RequestForwarder
from specrouter.cluster.metrics import ClusterAccounts
from specrouter.cluster.resume import Progress
from specrouter.logs import REQUEST_ID
from specrouter.request.output import Delta
from specrouter.request.spec import RequestSpec

logger = logging.getLogger(__name__)


class Job:
    """The listener is told the end once."""

    def __init__(
        self,
        context: ForwardingContext,
        progress: Progress,
        spec: RequestSpec,
        accounts: ClusterAccounts,
        listener: Callable[[Delta], None],
    ) -> None:
        self._context, self._progress = context, progress
        self._accounts, self._listener = accounts, listener
        self._has_ended = False
        self._forwarder = RequestForwarder(context, progress, spec, REQUEST_ID.get(), self._deliver)

    async def run(self) -> None:
        try:
            await self._forwarder.run()
        except asyncio.CancelledError:
            self.stop()
            raise

    def stop(self) -> None:
        """Ends it as it stands; nothing happens where it has ended."""
        if not self._has_ended:
            context = self._context
            cancelled = self._progress.ended(
                "cancelled", None, context.tokenizer, context.eos_token_ids
            )
            self._deliver(cancelled)

    def _deliver(self, delta: Delta) -> None:
        if self._has_ended:
            return
        if delta.output is not None:
            self._has_ended = True
            self._accounts.ended(delta.output, self._progress.elapsed_s())
        try:
            self._listener(delta)
        except RuntimeError as error:  # its event loop is closed
            logger.debug("a listener is gone: %s", error)
