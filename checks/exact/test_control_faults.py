"""Nothing in the control plane can end a request; see `checks.exact.control_faults`."""

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from checks.exact.control_faults import (
    ROW,
    TERMINAL,
    ControlFaultCheck,
    Fault,
    Service,
    Target,
    even_machine,
    find_functions,
    without_numbers,
)
from checks.exact.models import save_family
from specrouter.view import EngineView, Standing

PARTS = 8
# One of every kind of place, and a mode for each.
SAMPLE = {
    "processors.draft.DraftProcessor.draft": "always",
    "processors.grammar_masks.GrammarMasks.at": "once",
    "processors.token_tree.TokenTree.on_text": "always",
    "specrouter.engine.planning.CyclePlanning.admission": "always",
    "specrouter.engine.quarantine.BackOff.lasts": "always",
    "specrouter.engine.view_builder.ViewBuilder.build": "always",
    "specrouter.execution.drafter_prefill.DrafterPrefill.begin": "always",
    "specrouter.execution.drafter_prefill.DrafterPrefill.read": "once",
    "specrouter.execution.executor.CachedPrefixes.use": "always",
    "specrouter.execution.executor.Executor.run": "once",
    "specrouter.execution.group_draft.leave_selected": "always",
    "specrouter.profile.acceptance.AcceptanceEstimator.worth": "nan",
    "specrouter.profile.learning.learn_cycle": "always",
    "specrouter.profile.time_curve.TimeCurve.many": "nan",
    "specrouter.request.detokenizer.Detokenizer.push": "once",
    "specrouter.routing.planner.Planner.plan": "nan",
    "specrouter.routing.scheduler.ModelChainScheduler.choose": "always",
    "specrouter.engine.slo_accounts.SloAccounts.record": "always",
    "specrouter.slo.tree_planner.TreePlanner.selector": "sleep",
    "specrouter.execution.quotations.Quotations.instead": "always",
    "statemgr.output_store.OutputStore.keep": "always",
    "statemgr.suffix_table.SuffixTable.predict": "nan",
}


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    threads, level = torch.get_num_threads(), logging.root.manager.disable
    torch.set_num_threads(1)
    logging.disable(logging.CRITICAL)  # a traceback for each injected failure
    try:
        with even_machine() as clock:
            service = Service(save_family(tmp_path_factory.mktemp("faults"), noise=0.02), clock)
            assert service.runs, "found before a fault leaves its traces"
            yield service
            service.close()
    finally:  # after a start that failed or was skipped, too
        logging.disable(level)
        torch.set_num_threads(threads)


def test_some_hundred_functions_are_found_and_called(service: Service) -> None:
    every = find_functions()
    assert SAMPLE.keys() <= {one.name for one in every}
    names = {one.name for one, _ in service.runs}
    assert len(names) > 400
    assert len(service.runs) > 2000
    assert not SAMPLE.keys() - names, sorted(SAMPLE.keys() - names)


def test_what_may_end_more_than_its_request_is_a_short_list_of_what_there_is() -> None:
    names = [one.name for one in find_functions()]
    for beginning in (*TERMINAL, *ROW):
        assert any(name.startswith(beginning) for name in names), beginning
    assert 11 * sum(name.startswith(TERMINAL) for name in names) <= len(names)


@pytest.mark.parametrize(("name", "mode"), SAMPLE.items(), ids=SAMPLE)
def test_a_fault_costs_at_most_the_request_that_it_belongs_to(
    service: Service, name: str, mode: Any
) -> None:
    [target] = [one for one in find_functions() if one.name == name]
    check = ControlFaultCheck(service=service)
    for seed in (1, 2, 3):  # what rests since an earlier play is called in a later one
        check.play(target, mode, seed)
        if check.fired:
            break
    assert check.failures == []
    assert check.fired


@pytest.mark.exact
@pytest.mark.parametrize("part", range(PARTS))
def test_every_fault_costs_at_most_the_request_that_it_belongs_to(
    service: Service, part: int
) -> None:
    """But for "sleep", which only moves measurements, as "nan" does: the command plays it."""
    check = ControlFaultCheck(service=service)
    runs = [one for one in service.runs if one[1] != "sleep"]
    for target, mode in runs[part::PARTS]:
        check.play(target, mode, seed=0)
    assert check.failures == []
    assert check.fired > 50  # some hundred runs: in each part most functions are called again


# The injection itself


def test_numbers_become_nan_wherever_they_stand() -> None:
    table = {"a": [1.0, "x"], "b": (2, 3.0)}
    assert str(without_numbers(table)) == "{'a': [nan, 'x'], 'b': (2, nan)}"
    assert np.isnan(without_numbers(np.ones(2))).all()
    assert without_numbers(7) != 7
    for kept in (True, None, "x", np.arange(2), [1, 2], Path("x")):
        assert without_numbers(kept) is kept
    standing = Standing(evaluated_at=3)
    assert without_numbers(standing) is standing, "numbers of frozen values stay if they are whole"


def test_a_fault_is_gone_afterwards() -> None:
    target = Target("specrouter.view.EngineView.by_row", EngineView, "by_row")
    before = vars(EngineView)["by_row"]
    with Fault(target, "always").armed():
        assert vars(EngineView)["by_row"] is not before
    assert vars(EngineView)["by_row"] is before
