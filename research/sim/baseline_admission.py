"""Admission as vLLM and Sarathi-Serve have it: prompts first, or those that decode first.

Both admit in the order of arrival while there are rows and memory. Neither knows objectives, but
for the size of Sarathi-Serve's batches, which is chosen beforehand.

Pure: `(EngineView) -> Admission`. Sources: vLLM (SOSP '23) before its chunked prefills;
Sarathi-Serve (OSDI '24), Algorithm 3; both as SLOs-Serve (arXiv 2504.08784), sections 2.3 and 6,
configures them.
"""

from specrouter.slo.admission import Admission, Admit, those_that_fit
from specrouter.view import EngineView


def prefill_first(batch_tokens: int) -> Admit:
    """Whole prompts, as many as fit in `batch_tokens`, at least one; nobody decodes meanwhile."""

    def policy(view: EngineView) -> Admission:
        came, waits = those_that_fit(view)
        reading = [one for one in view.running if one.prompt_left or one.awaits_first]
        served, left = set[int](), batch_tokens
        for one in (*reading, *came):
            left -= one.prompt_left + 1
            if left < 0 and served:
                break
            served.add(one.id)
        decoding = {one.id for one in view.running if not one.prompt_left}
        return Admission(
            admitted=tuple(one.id for one in came if one.id in served),
            # A prompt of one token has nothing to read: it decodes at once.
            chunks={
                one.id: one.prompt_left + 1
                for one in (*reading, *came)
                if one.id in served and one.prompt_left
            },
            waits_for_memory=waits,
            paused=frozenset(decoding - served if served else ()),
        )

    return policy


def decode_first(batch_tokens: int) -> Admit:
    """A token for each that decodes, and chunks of prompts in what is left of `batch_tokens`."""

    def policy(view: EngineView) -> Admission:
        came, waits = those_that_fit(view)
        together = (*view.running, *came)
        left = batch_tokens - sum(not one.prompt_left for one in together)
        chunks = dict[int, int]()
        for one in together:
            if left > 0 and one.prompt_left:
                chunks[one.id] = min(one.prompt_left + 1, left)
                left -= chunks[one.id]
        return Admission(
            admitted=tuple(one.id for one in came), chunks=chunks, waits_for_memory=waits
        )

    return policy
