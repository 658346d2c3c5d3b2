"""The long checks at full size (`make exact`).

They use the bundled pool and the bundled prompts; set SPECROUTER_PROMPTS to a folder of JSONL
files to use others.
"""

import os

import pytest

from tests.exact import bf16, breadth, distribution, faults, greedy, seeded

pytestmark = pytest.mark.exact


@pytest.fixture
def prompts() -> list[str]:
    folder = os.environ.get("SPECROUTER_PROMPTS")
    return ["--prompts", folder] if folder else []


def test_greedy_tokens_are_those_of_generate(prompts: list[str]) -> None:
    assert greedy.main(prompts) == 0


def test_seeded_tokens_do_not_depend_on_how_a_request_is_served(prompts: list[str]) -> None:
    assert seeded.main(prompts) == 0


def test_seeded_tokens_follow_the_processed_distribution() -> None:
    assert distribution.main([]) == 0


def test_rejection_follows_the_processed_distribution() -> None:
    assert distribution.main(["--verification", "rejection"]) == 0


def test_bfloat16_seldom_parts_from_target_only_decoding(prompts: list[str]) -> None:
    assert bf16.main(prompts) == 0


def test_branches_bring_more_tokens_per_pass(prompts: list[str]) -> None:
    assert breadth.main(prompts) == 0


def test_faults_never_change_an_output() -> None:
    assert faults.main([]) == 0
