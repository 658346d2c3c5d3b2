"""What one cycle teaches the profiler: its time, its tokens, and how predictions came out.

Not here: what drafts and verifications teach while they run (`specrouter.execution`).
"""

from collections.abc import Collection

from specrouter.cycle import ChainGroup, CyclePlan, CycleResult
from specrouter.profile.profiler import PerformanceProfiler


def learn_cycle(
    profiler: PerformanceProfiler, plan: CyclePlan, result: CycleResult, elapsed_ms: float
) -> None:
    gained = {commit.row: len(commit.tokens) for commit in result.commits}
    decoded = [row for group in plan.groups for row in group.rows.tolist()]
    is_regular = result.is_regular and not result.failures and not len(plan.prefill_rows)
    stage, is_timely = None, is_regular and not (result.caught_up or result.quoted_rows)
    if is_timely and gained and not result.overlaps:
        stage = "drafting" if any(len(group.chain) > 1 for group in plan.groups) else "cycle"
    requests = sum(row in gained for row in decoded)
    profiler.record_cycle(elapsed_ms, sum(gained.values()), requests, stage)
    if not is_regular:
        return
    untold = result.cut_rows | result.behind_rows | result.quoted_rows
    for group in plan.groups:
        counts = [gained[row] for row in group.rows.tolist() if row in gained and row not in untold]
        time_ms = elapsed_ms if is_timely else None
        _learn_outcome(profiler, group, len(decoded), counts, time_ms)


def _learn_outcome(
    profiler: PerformanceProfiler,
    group: ChainGroup,
    decoded: int,
    counts: Collection[int],
    elapsed_ms: float | None,
) -> None:
    """`counts`: tokens that each request gained; `elapsed_ms` None: the cycle was like no other."""
    option = group.predicted
    if option is None:
        return
    profiler.record_outcome(
        option.chain,
        decoded,
        0.0 if elapsed_ms is None else option.plain_ms,
        elapsed_ms or 0.0,
        (option.plain_tokens - 1.0) * len(counts),
        float(sum(counts) - len(counts)),
        option.sampled,
    )
