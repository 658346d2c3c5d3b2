"""Requests share prefixes while models lose what they have read: no text changes in float64."""

from pathlib import Path

import pytest

from checks.exact.prefix import check


@pytest.mark.exact
def test_no_text_differs_where_models_are_lost_while_prefixes_are_shared(tmp_path: Path) -> None:
    figures, report = check(tmp_path, "float64", requests=500, overlap=False, losses=0.1)
    assert (figures.differing, figures.leaked, report["control_faults"]) == ([], [], {})
    assert figures.requests >= 500
    assert report["hits"] > 100
    assert {what.split()[0] for what in report["lost"]} == {"evicted", "rested", "given"}
    assert sum(report["lost"].values()) > 100
