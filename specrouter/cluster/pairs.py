"""Stream pairs: two replicas, of which one reads prompts and the other continues from there.

Contract: pure. A pair is one choice of the routing policy. Each half can serve whole requests, and
does so if the other one cannot be chosen, or has no free row while it has one: no half is idle
while the other is overloaded. Sources: StreamServe (stream pairs); SLOs-Serve (arXiv 2504.08784),
section 2.3 and appendix A, against a fixed division of the work.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from specrouter.cluster.correction import Correction
from specrouter.cluster.state import ReplicaState, ReplicaView, RoutedRequest

Halves = tuple[str, str]  # names of prefill and decode


def arranged(
    views: Sequence[ReplicaView], pairs: Mapping[str, Halves]
) -> tuple[list[ReplicaView], dict[str, str]]:
    """Return the choices for a request, and the replicas that are left out, with the reason.

    The choices are replicas, pairs as one each, and halves that serve a request whole.
    """
    by_name = {view.name: view for view in views}
    found, left_out = [], dict[str, str]()
    pair_of = {prefill: name for name, (prefill, _) in pairs.items()}
    others = {one: other for pair in pairs.values() for one, other in (pair, pair[::-1])}
    for view in views:
        other = by_name.get(others.get(view.name, ""))
        if other is None or (_is_full(other) and not _is_full(view)):
            found.append(view)
        elif _is_full(view) and not _is_full(other):
            left_out[view.name] = f"has no row left, while {other.name} has"
        elif view.name in pair_of:
            found.append(joined(pair_of[view.name], view, other))
    return found, left_out


def joined(name: str, prefill: ReplicaView, decode: ReplicaView) -> ReplicaView:
    """Return a pair's view for policies.

    Memory and speed are those of the decode half, queue and prompts those of the prefill half, rows
    those of both.
    """
    return replace(
        decode,
        name=name,
        state=_joined(prefill.state, decode.state),
        reported=_joined(prefill.reported, decode.reported),
        age_s=max(prefill.age_s, decode.age_s),
        sent=prefill.sent + decode.sent,
        sent_tokens=prefill.sent_tokens,
        matched_tokens=prefill.matched_tokens,
        correction=Correction(decode.correction.tpot, prefill.correction.ttft),
    )


def reading(routed: RoutedRequest) -> RoutedRequest:
    """Return the request for the prefill half: a first token in time."""
    objective = routed.objective
    if objective is not None and objective.ttft_ms is None:
        objective = None
    if objective is not None:
        objective = replace(objective, tpot_ms=None, stages=(), e2e_ms=None)
    return replace(routed, remaining=1, objective=objective)


def _is_full(view: ReplicaView) -> bool:
    """Return True if a further request would wait for a row."""
    return view.state.requests + view.sent >= view.state.rows


def _joined(prefill: ReplicaState, decode: ReplicaState) -> ReplicaState:
    return replace(
        decode,
        running=prefill.running + decode.running,
        waiting=prefill.waiting,
        rows=prefill.rows + decode.rows,
        unread_tokens=prefill.unread_tokens,
        prefill_ms=prefill.prefill_ms,
        max_request_tokens=min(prefill.max_request_tokens, decode.max_request_tokens),
        retry_after_s=max(prefill.retry_after_s, decode.retry_after_s),
    )
