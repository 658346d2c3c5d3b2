"""What fails in the control plane ends no request, and what is a row's own ends its row alone."""

import logging
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from checks.exact.control_faults import PLACES, Service
from test_support.even_machine import even_machine
from test_support.function_faults import functions_in

PARTS = 8
# Plays, after which what was learned is forgotten: drafts gain so little here that a long history
# may decide against them for good.
RENEWED_AFTER = 32
# At each boundary a function, a mode, and how many requests it may end.
BOUNDARIES = {
    "processors.draft.DraftProcessor.draft": ("always", 0),
    "processors.grammar_masks.GrammarMasks.at": ("once", 1),
    "specrouter.engine.planning.CyclePlanning.admission": ("always", 0),
    "specrouter.engine.view_builder.ViewBuilder.build": ("always", 0),
    "specrouter.engine.slo_accounts.SloAccounts.record": ("always", 0),
    "specrouter.execution.drafter_prefill.DrafterPrefill.read": ("once", 0),
    "specrouter.execution.executor.CachedPrefixes.use": ("always", 0),
    "specrouter.execution.quotations.Quotations.instead": ("always", 0),
    "specrouter.profile.acceptance.AcceptanceEstimator.path_worth": ("always", 0),
    "specrouter.profile.learning.learn_cycle": ("always", 0),
    "specrouter.profile.time_curve.TimeCurve.many": ("nan", 0),
    "specrouter.request.detokenizer.Detokenizer.push": ("once", 1),
    "specrouter.request.handle.RequestHandle.deliver": ("always", 0),  # the engine ends, and tells
    "specrouter.routing.planner.Planner.plan": ("nan", 0),
    "specrouter.routing.scheduler.ModelChainScheduler.choose": ("always", 0),
    "specrouter.slo.tree_planner.TreePlanner.selector": ("sleep", 0),
    "statemgr.output_store.OutputStore.keep": ("always", 0),
    "statemgr.suffix_table.SuffixTable.predict": ("nan", 0),
}


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    threads, level = torch.get_num_threads(), logging.root.manager.disable
    torch.set_num_threads(1)
    logging.disable(logging.CRITICAL)  # a traceback for each injected failure
    try:
        with even_machine() as clock:
            service = Service(tmp_path_factory.mktemp("faults"), clock)
            yield service
            service.close()
    finally:  # after a start that failed or was skipped, too
        logging.disable(level)
        torch.set_num_threads(threads)


@pytest.mark.parametrize("name", BOUNDARIES)
def test_a_fault_costs_at_most_the_request_that_it_belongs_to(service: Service, name: str) -> None:
    mode: Any
    mode, most = BOUNDARIES[name]
    [target] = [one for one in functions_in(PLACES) if one.name == name]
    for seed in range(1, 7):  # what rests since an earlier play is called in a later one
        if seed == 4:
            service.renew()  # drafting may have been found not to pay while faults were played
        fault, endings = service.play(target, mode, seed)
        assert endings["error"] + endings["refused"] <= most
        if fault.fired:
            return
    raise AssertionError("it is not called")


@pytest.mark.exact
@pytest.mark.parametrize("part", range(PARTS))
def test_no_fault_of_any_function_changes_a_text(service: Service, part: int) -> None:
    """But for "sleep", which only moves measurements, as "nan" does."""
    failures, fired = list[str](), 0
    runs = [one for one in service.runs() if one[1] != "sleep"]
    for number, (target, mode) in enumerate(runs[part::PARTS]):
        if number % RENEWED_AFTER == 0:
            service.renew()
        try:
            fired += service.play(target, mode)[0].fired > 0
        except Exception as error:
            failures.append(f"{target.name} {mode}: {type(error).__name__}: {error}")
    assert failures == []
    assert fired > 50  # some hundred runs: in each part most functions are called again
