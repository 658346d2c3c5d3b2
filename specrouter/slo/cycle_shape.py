"""The requests that take part in a cycle, and the shape of their drafts: the choice of most value.

The candidates are numbers of requests that take part, those with the least needs first, times the
shapes that the grid predicts. Drafts are verified either for all of them or only for those that
would fall behind in a cycle without drafts. A request sits out if it could not attain its objective
even in the fastest cycle, or if its row delays the others by more than it is worth, but for at most
`LONGEST_WAIT` cycles in a row. Requests without an objective always take part, and other requests'
drafts never slow them down: a shape with which they would get their tokens later than without
drafts is not taken.

Pure functions on arrays.
"""

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from specrouter.cycle import Option
from specrouter.profile.cycle_times import verification_ms
from specrouter.profile.prediction import OptionGrid
from specrouter.profile.snapshot import PerformanceSnapshot, outcome_of
from specrouter.slo.value import SPARE_TOKEN, attainable, value

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]

LONGEST_WAIT = 32  # cycles in a row that a request may sit out
_COUNTS = 5  # numbers of requests that are compared


@dataclass(frozen=True, eq=False)
class CycleChoice:
    """The requests `active` [B] that take part, and the `option` for them; None: no drafts."""

    active: Bools
    option: Option | None


@dataclass(frozen=True)
class Beside:
    """The other work of a cycle.

    Attributes:
        prompt_tokens: prompt tokens that the target reads in the same pass.
        others: requests that decode in the same pass on another route.
        reading_ms: time of drafters that read unread tokens for drafts of later cycles.
        catch_up_ms: time of drafters that read unread tokens for the drafts of this cycle.
    """

    prompt_tokens: int = 0
    others: int = 0
    reading_ms: float = 0.0
    catch_up_ms: float = 0.0


def choose_cycle(
    snapshot: PerformanceSnapshot,
    grid: OptionGrid,
    rates: Floats,
    waited: Ints,
    beside: Beside = Beside(),
) -> CycleChoice:
    """Return the best cycle for B requests whose drafts the grid predicts.

    Args:
        snapshot: measured times and outcomes.
        grid: predictions of the chain by the shape of its drafts.
        rates: [B] of `needed_rates`.
        waited: [B] cycles in a row that each has sat out.
        beside: the other work of the cycle.
    """
    menu = grid.menu
    nodes = np.concatenate(([0], menu.nodes))
    tokens = np.concatenate(([1.0], menu.tokens))
    count = np.array([len(rates)])
    everyone = _cycle_ms(snapshot, grid, count, count[:, None], nodes, beside)[0, 0]
    helped = attainable(rates, (tokens / everyone).max())
    order = _service_order(rates, helped, waited)
    active = _numbers(rates, helped, waited)
    taking = np.arange(len(rates)) < active[:, None]  # [M, B]
    in_need = helped[order] * everyone[0] > 1.0
    sharing = np.stack((np.ones_like(in_need), in_need))  # [2, B] with verified drafts
    drafting = taking.astype(np.int64) @ sharing.T  # [M, 2]
    ms = _cycle_ms(snapshot, grid, active, drafting, nodes, beside)  # [M, 2, E]
    gained = np.where(sharing[:, None, :], tokens[:, None], 1.0)  # [2, E, B]
    each = value(gained, helped[order], ms[..., None])  # [M, 2, E, B]
    total = (each * taking[:, None, None, :]).sum(axis=3) + SPARE_TOKEN * beside.others / ms
    if (rates == 0.0).any():
        is_slower = np.stack((tokens, np.ones_like(tokens))) / ms < (1.0 - 1e-9) / everyone[0]
        total = np.where(is_slower, -np.inf, total)
    total[:, 1] = np.where(drafting[:, 1:] > 0, total[:, 1], -np.inf)
    best_at = np.unravel_index(int(np.argmax(total[::-1])), total.shape)  # ties: most requests
    row, who, entry = len(active) - 1 - int(best_at[0]), int(best_at[1]), int(best_at[2])
    takes = np.zeros(len(rates), dtype=np.bool_)
    takes[order[: active[row]]] = True
    option = None
    if entry:
        found = grid.option(menu.rows[entry - 1], menu.columns[entry - 1])
        share = float(drafting[row, who] / active[row])
        shape = replace(found.shape, nodes=max(1, round(found.shape.nodes * share)))
        cycle_ms = float(ms[row, who, entry])
        option = replace(found, shape=shape, cycle_ms=cycle_ms, plain_ms=0.0)
    return CycleChoice(takes, option)


def _numbers(rates: Floats, helped: Floats, waited: Ints) -> Ints:
    """Return the numbers [M] of requests to compare, ascending.

    Each includes all that must take part. One is the number of all that must or can attain their
    objectives.
    """
    must = int(((rates == 0.0) | (waited >= LONGEST_WAIT)).sum())
    able = max(must, len(rates) - int(((helped == 0.0) & (rates > 0.0)).sum()), 1)
    numbers = np.rint(np.linspace(max(1, must), len(rates), _COUNTS)).astype(np.int64)
    return np.unique(np.append(numbers, able))


def _service_order(rates: Floats, helped: Floats, waited: Ints) -> Ints:
    """Return the order: those that waited too long, by rising need, and last those given up."""
    lost = (helped == 0.0) & (rates > 0.0)
    tier = np.where(waited >= LONGEST_WAIT, 0, np.where(lost, 2, 1))
    return np.lexsort((rates, tier))


def _cycle_ms(
    snapshot: PerformanceSnapshot,
    grid: OptionGrid,
    active: Ints,
    drafting: Ints,
    nodes: Ints,
    beside: Beside,
) -> Floats:
    """Return the time [M, D, E] of a cycle without its prompts.

    `active` [M] requests take part, of which `drafting` [M, D] have `nodes` [E] verified.
    """
    workload, target = grid.workload, grid.chain[-1]
    levels = np.concatenate(([0.0], grid.menu.levels_ms))
    scale = 0.5 + 0.5 * active[:, None, None] / workload.requests
    batch = (active + beside.others)[:, None, None]
    places = batch + drafting[:, :, None] * nodes
    target_ms = verification_ms(snapshot, workload, target, places, beside.prompt_tokens, batch)
    if beside.prompt_tokens:
        with_prompts = target_ms[:, :, :1]  # the first entry is of no nodes
        target_ms -= with_prompts - verification_ms(snapshot, workload, target, batch, 0, batch)
    plain = outcome_of(snapshot, (target,), workload.batch, workload.sampled).time
    factor = snapshot.machine * np.where(nodes > 0, grid.correction, plain)
    extra = beside.reading_ms + np.where(nodes > 0, beside.catch_up_ms, 0.0)
    ms: Floats = factor * (scale * levels + target_ms) + extra
    return ms
