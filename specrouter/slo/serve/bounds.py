"""Bounds: what may be drafted in a cycle that has to end in time for promised prompts. Pure."""

from collections.abc import Sequence
from dataclasses import replace

from specrouter.slo.admission import Admission
from specrouter.slo.serve.pacing import Batch
from specrouter.view import EngineView


def bounded(admission: Admission, view: EngineView, batch: Batch, free: Sequence[int]) -> Admission:
    """The admission within the batch's bounds.

    Args: `free`: ids of those who run without an objective and may sit out, the first ones last.
    """
    if batch.spare is None:
        return admission
    lost = set(admission.preempted)
    decoding = {one.id for one in view.running if not one.prompt_left and one.id not in lost}
    paused = frozenset([each for each in free if each in decoding][batch.spare :])
    if batch.deepest is None:
        return replace(admission, budget_ms=batch.longest_ms, paused=paused)
    taking = decoding - paused
    nodes = batch.most_tokens - sum(admission.chunks.values()) - len(taking)
    depths = dict.fromkeys(sorted(taking), batch.deepest)
    return replace(admission, paused=paused, depths=depths, budget_nodes=max(0, nodes))
