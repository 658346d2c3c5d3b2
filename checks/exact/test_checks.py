"""The long checks (`make exact`), of such a size that all of them take two cores 20 minutes.

Texts are as long as those of research/LOG.md, of more prompts; of seeds, bursts and conversations
there are fewer, which the commands themselves have in full. They use the bundled pool and the
bundled prompts; set SPECROUTER_PROMPTS to a folder of JSONL files to use others.
"""

import os
from pathlib import Path

import pytest

from checks.exact import array_check, distribution, faults, prefix, rounding
from checks.exact.array_check import DTYPES
from modelpool.fast.cpu import computes_in
from test_support.factories import HYBRID, HYBRIDS

pytestmark = pytest.mark.exact
LONE = ("--lone-share", "4")  # a fourth of the requests in each arrangement, in turn
NEW = ("--new-tokens", "24")


@pytest.fixture
def prompts() -> list[str]:
    folder = os.environ.get("SPECROUTER_PROMPTS")
    return [*LONE, *(["--prompts", folder] if folder else [])]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("check", ["greedy", "seeded"])
def test_tokens_are_the_oracles_under_the_covering_array(
    check: str, dtype: str, prompts: list[str]
) -> None:
    assert array_check.main([check, *prompts, *NEW, "--dtypes", dtype]) == 0


def test_seeded_tokens_follow_the_processed_distribution() -> None:
    assert distribution.main(["--seeds", "5000"]) == 0


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_rounding_seldom_parts_from_target_only_decoding(dtype: str, prompts: list[str]) -> None:
    if not computes_in(dtype):
        pytest.skip(f"this CPU emulates {dtype}, in which bits depend on the pack")
    assert rounding.main([*prompts, "--new-tokens", "48", "--dtypes", dtype]) == 0


def test_no_text_differs_where_models_are_lost_while_prefixes_are_shared(tmp_path: Path) -> None:
    figures, report = prefix.check(tmp_path, "float64", requests=500, losses=0.1)
    assert (figures.differing, figures.leaked, report["control_faults"]) == ([], [], {})
    assert figures.requests >= 500
    assert report["hits"] > 100
    assert report["preemptions"] > 100
    assert {what.split()[0] for what in report["lost"]} == {"evicted", "rested", "given"}
    assert sum(report["lost"].values()) > 100


@pytest.mark.parametrize("architecture", [name for name in HYBRIDS if name != HYBRID])
def test_no_text_differs_where_recurrent_states_are_shared_preempted_and_lost(
    architecture: str, tmp_path: Path
) -> None:
    figures, report = prefix.check(tmp_path, "float64", 250, losses=0.05, architecture=architecture)
    assert (figures.differing, figures.leaked, report["control_faults"]) == ([], [], {})
    assert report["hits"] > 20
    assert report["evictions"] > 10
    assert report["preemptions"] > 50


@pytest.mark.parametrize("half", range(2))
def test_faults_never_change_an_output(half: int) -> None:
    """Each half has architectures of its own: to make models and references takes long."""
    lifetimes = ("--first-lifetime", f"{half}", "--step", "2")
    assert faults.main(["--runs", "500", *lifetimes]) == 0
