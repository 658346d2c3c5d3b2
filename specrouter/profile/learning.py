"""Learning from one cycle: its time, its tokens, and the outcome of its predictions.

Not here: what drafting and verification teach while they run (`specrouter.execution`).
"""

from specrouter.cycle import CyclePlan, CycleResult
from specrouter.profile.profiler import PerformanceProfiler


def learn_cycle(
    profiler: PerformanceProfiler, plan: CyclePlan, result: CycleResult, elapsed_ms: float
) -> None:
    gained = {commit.row: len(commit.tokens) for commit in result.commits}
    decoded = [row for group in plan.groups for row in group.rows.tolist()]
    is_regular = result.is_regular and not result.failures and not len(plan.prefill_rows)
    stage, is_timely = None, is_regular and not (result.caught_up or result.quoted_rows)
    drafts = any(len(group.chain) > 1 for group in plan.groups)
    if is_timely and gained:
        stage = "drafting" if drafts else "cycle"
    elif result.quoted_rows and is_regular and gained and not drafts:
        stage = "quoting"
    requests = sum(row in gained for row in decoded)
    profiler.record_cycle(elapsed_ms, sum(gained.values()), requests, stage)
    if not is_regular:
        return
    untold = result.cut_rows | result.behind_rows | result.quoted_rows
    for group in plan.groups:
        option = group.predicted
        if option is None:
            continue
        counts = [gained[row] for row in group.rows.tolist() if row in gained and row not in untold]
        profiler.record_outcome(
            option.chain,
            len(decoded),
            option.plain_ms if is_timely else 0.0,
            elapsed_ms if is_timely else 0.0,
            (option.plain_tokens - 1.0) * len(counts),
            float(sum(counts) - len(counts)),
            option.sampled,
        )
