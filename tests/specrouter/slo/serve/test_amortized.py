"""Prompts that cannot wait are read at once, if those that decode can make it good."""

from dataclasses import replace

import numpy as np
from hypothesis import example, given, settings
from hypothesis import strategies as st

from research.sim.roofline import RooflineTime
from specrouter.slo.serve.amortized import Amortized
from specrouter.slo.serve.load import Load, Prompt
from specrouter.slo.serve.pacing import Choice, Memory
from specrouter.slo.serve.policy import by_objectives
from tests.pure import few
from tests.specrouter.slo.test_admission import request, view
from tests.specrouter.slo_machines import OPT_7B

ROOMY = Memory(rows=64)
CHUNK = 512
ALPHA = 0.7
PACING = Amortized(OPT_7B, 100.0, ALPHA, margin=0.1, chunk=CHUNK)


def decoding(*tpots_ms: float, left: float = 100.0) -> Load:
    paces = np.array(tpots_ms, dtype=np.float64)
    return Load(
        ids=tuple(range(len(paces))),
        due_ms=paces,
        tpot_ms=paces,
        left=np.full(len(paces), left),
        prompts=(),
    )


def prompt(name: int, deadline_ms: float, tokens: int, tpot_ms: float = 100.0) -> Prompt:
    return Prompt(id=name, deadline_ms=deadline_ms, tokens=tokens, tpot_ms=tpot_ms)


loads = st.lists(st.floats(30.0, 120.0), max_size=24).map(lambda each: decoding(*each))
prompts = st.lists(st.tuples(st.floats(20.0, 400.0), st.integers(1, 900)), max_size=5).map(
    lambda found: [prompt(100 + n, ms, tokens) for n, (ms, tokens) in enumerate(found)]
)


def names(found: tuple[Prompt, ...]) -> set[int]:
    return {each.id for each in found}


def test_what_a_prompt_takes_is_shared_by_the_tokens_that_are_left() -> None:
    """By hand: 600 tokens take 400 ms here, 4 ms of each of 100 tokens, or 40 of each of 10."""
    times = RooflineTime(((2.0 / 3.0, 0.0, 20.0),))
    pacing = Amortized(times, 100.0, chunk=CHUNK)
    now = prompt(9, 500.0, 600)
    for left, admits in ((100.0, True), (10.0, False)):
        found = pacing.choose(decoding(40.0, left=left), [now], ROOMY)
        assert bool(found.admitted) == admits
        assert found.in_time


@given(loads, st.integers(1, 4))
def test_prompts_that_can_wait_delay_nobody(load: Load, count: int) -> None:
    """They are read in cycles that bring each request as many tokens as it needs meanwhile."""
    calm = [prompt(100 + n, 60_000.0, 3000) for n in range(count)]
    batch = PACING.batch(load.joined(calm), Choice())
    if not len(load.ids):
        assert batch.ms == PACING.idle_ms
        return
    steps = int(batch.lengths.max(initial=1)) - 1
    if batch.lengths.all():
        assert OPT_7B.ms(batch.tokens, steps) <= batch.ms * (1.0 + 1e-9)
        gained = PACING.reach[batch.lengths - 1]
        assert (batch.ms <= gained * load.tpot_ms * 0.9 * (1.0 + 1e-6)).all()


def test_an_urgent_prompt_is_read_whole_though_a_calm_cycle_has_less_room() -> None:
    load, soon = decoding(*[50.0] * 250), prompt(100, 150.0, 500)
    later = replace(soon, deadline_ms=60_000.0)
    calm = PACING.batch(load.joined([later]), Choice())
    assert calm.tokens - calm.lengths.sum() < 500
    assert names(PACING.choose(load, [soon], ROOMY).admitted) == {100}
    batch = PACING.batch(load.joined([soon]), Choice())
    assert batch.tokens - batch.lengths.sum() >= 500


@given(loads, prompts, st.integers(0, 4))
def test_never_more_are_admitted_than_there_are_rows(
    load: Load, new: list[Prompt], rows: int
) -> None:
    found = PACING.choose(load, new, Memory(rows))
    assert len(found.admitted) <= rows


@given(loads, prompts)
def test_nobody_is_given_up_while_all_are_in_time(load: Load, new: list[Prompt]) -> None:
    found = PACING.choose(load, new, ROOMY)
    if PACING.is_in_time(load):
        assert not found.given_up
    assert found.given_up <= len(load.ids)
    assert found.in_time or not found.admitted


@given(loads, prompts, st.lists(st.floats(8.0, 120.0), min_size=5, max_size=5))
@settings(max_examples=few(300))
def test_all_that_are_admitted_are_in_time_together(
    load: Load, new: list[Prompt], tpots_ms: list[float]
) -> None:
    new = [replace(each, tpot_ms=ms) for each, ms in zip(new, tpots_ms, strict=False)]
    found = PACING.choose(load, new, ROOMY)
    lighter = load.without_neediest(found.given_up)
    assert PACING.is_in_time(lighter.joined(found.admitted)) or not found.in_time


@given(st.integers(1, 60), st.integers(0, 200))
def test_those_without_an_objective_take_what_the_paces_of_the_others_leave(
    paced: int, others: int
) -> None:
    """By hand: a cycle of 20 ms and half a millisecond a token may take 40, which are 40 tokens."""
    pacing = Amortized(RooflineTime(((0.5, 0.0, 20.0),)), 100.0, chunk=CHUNK)
    load = replace(decoding(*[50.0] * paced), others=others)
    found = pacing.batch(load, Choice())
    left = max(0, 40 - paced)
    if paced <= 40 and not others:
        assert (found.spare, found.room) == (None, left)
    else:
        assert (found.spare, found.room) == (left, max(0, left - others))


def test_nobody_sits_out_where_nobody_has_a_pace() -> None:
    load = replace(decoding(), others=500)
    assert PACING.batch(load, Choice()).spare is None


def test_no_cycle_takes_longer_than_a_promised_prompt_allows() -> None:
    """Nor does who decodes without an objective take part where there is no room."""
    asked = {"tpot_ms": 100.0, "ttft_ms": 200.0}
    decode = [request(n, row=n, left=0, decoded=3, decode_ms=90.0, **asked) for n in range(20)]
    free = [request(50 + n, row=50 + n, left=0, decoded=3, decode_ms=90.0) for n in range(600)]
    new = [request(900, left=600, **asked), request(901, left=900, **asked)]
    seen = view(new, [*decode, *free])
    found = by_objectives(lambda _: PACING, 2048)(seen)
    assert found.admitted
    assert found.budget_ms is not None
    assert found.budget_ms <= 200.0
    taking = len(decode) + len(free) - len(found.paused) + sum(found.chunks.values())
    assert OPT_7B.ms(taking) <= found.budget_ms
    assert found.paused < {each.id for each in free}
    assert by_objectives(lambda _: PACING, 2048)(view([], [*decode, *free])).budget_ms is None


@given(loads, st.floats(1.0, 3.0))
def test_who_is_in_time_stays_so_with_looser_objectives(load: Load, looser: float) -> None:
    loose = replace(load, tpot_ms=load.tpot_ms * looser)
    if PACING.is_in_time(load):
        assert PACING.is_in_time(loose)


@given(st.lists(st.floats(6.0, 60.0), min_size=1, max_size=64))
@example([12.0] * 20 + [60.0] * 40)  # 20 of them, where a search in powers of two gave up 32
def test_no_more_are_given_up_than_need_be(tpots_ms: list[float]) -> None:
    load = decoding(*tpots_ms)
    given_up = len(tpots_ms) - len(PACING.in_time(load, (), 0.0))
    paces = np.sort(PACING._paces(load))
    assert PACING._beside(paces[given_up:], given_up) is not None
    assert not given_up or PACING._beside(paces[given_up - 1 :], given_up - 1) is None


def test_where_running_requests_are_given_up_batches_have_their_time() -> None:
    """In which a prompt that was not admitted after all may be read later."""
    pacing = Amortized(OPT_7B, 100.0, chunk=CHUNK)
    load = decoding(*[22.0] * 8, *[90.0] * 24)
    found = pacing.choose(load, [prompt(100, 150.0, 100)], ROOMY)
    assert found.given_up
    assert pacing.batch(load.without_neediest(found.given_up), Choice()).tokens > 0


def test_those_that_fell_behind_keep_nobody_out() -> None:
    """A request whose pace can hardly be kept is given up for those that must be read now."""
    slow = decoding(1.1 * PACING.fastest_ms)
    assert not PACING.is_in_time(slow)
    new = [prompt(100, 200.0, 100), prompt(101, 2000.0, 100)]
    found = PACING.choose(slow, new, ROOMY)
    assert (found.given_up, names(found.admitted)) == (1, {100})
    soft = replace(prompt(102, 200.0, 100), is_soft=True)
    assert names(PACING.choose(slow, [soft], ROOMY).admitted) == {102}, "nobody could keep it"
    crowd = decoding(*[1.3 * PACING.fastest_ms] * 64)
    found = PACING.choose(crowd, [soft, new[0]], ROOMY)
    assert found.given_up > 1
    assert names(found.admitted) == {100}


def test_a_prompt_with_a_pace_that_nobody_can_keep_keeps_nobody_out() -> None:
    hopeless = prompt(50, 60_000.0, 5000, tpot_ms=1.05 * PACING.fastest_ms)
    load = decoding(100.0).joined([hopeless])
    assert names(PACING.choose(load, [prompt(100, 4000.0, 100)], ROOMY).admitted) == {100}
    assert PACING.in_time(load, load.prompts, 0.0) == {0}
