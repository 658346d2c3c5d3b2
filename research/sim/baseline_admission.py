"""Admission as vLLM and Sarathi-Serve have it: prompts first, or those that decode first.

Both admit in the order of arrival while there are rows and memory. Neither knows objectives, but
for the size of Sarathi-Serve's batches, which is chosen beforehand.

Pure: `(EngineView) -> Admission`. Sources: vLLM (SOSP '23) before its chunked prefills;
Sarathi-Serve (OSDI '24), Algorithm 3; both as SLOs-Serve (arXiv 2504.08784), sections 2.3 and 6,
configures them.
"""

import numpy as np

from specrouter.slo.admission import Admission, Admit, those_that_fit
from specrouter.view import EngineView


def prefill_first(batch_tokens: int) -> Admit:
    """Whole prompts, as many as fit in `batch_tokens`, at least one; nobody decodes meanwhile."""

    def policy(view: EngineView) -> Admission:
        came, waits = those_that_fit(view)
        running = view.running
        reading = running.take((running.unread > 0) | running.awaits_first).joined(came)
        tokens = reading.unread + 1
        # At least one; those behind the first that does not fit are not served either.
        count = max(1, int((np.cumsum(tokens) <= batch_tokens).sum()))
        served = reading.take(np.arange(min(count, len(reading))))
        names = set(served.id.tolist())
        # A prompt of one token has nothing to read: it decodes at once.
        prompts = served.take(served.unread > 0)
        decoding = set(running.id[running.unread == 0].tolist())
        return Admission(
            admitted=tuple(one for one in came.id.tolist() if one in names),
            chunks=dict(zip(prompts.id.tolist(), (prompts.unread + 1).tolist(), strict=True)),
            waits_for_memory=waits,
            paused=frozenset(decoding - names if names else ()),
        )

    return policy


def decode_first(batch_tokens: int) -> Admit:
    """A token for each that decodes, and chunks of prompts in what is left of `batch_tokens`."""

    def policy(view: EngineView) -> Admission:
        came, waits = those_that_fit(view)
        together = view.running.joined(came)
        left = batch_tokens - int((together.unread == 0).sum())
        chunks = dict[int, int]()
        for one, unread in zip(together.id.tolist(), together.unread.tolist(), strict=True):
            if left > 0 and unread:
                chunks[one] = min(unread + 1, left)
                left -= chunks[one]
        return Admission(admitted=tuple(came.id.tolist()), chunks=chunks, waits_for_memory=waits)

    return policy
