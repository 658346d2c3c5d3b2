"""Every class of transformers that writes texts is served exactly or refused, and is told apart."""

from typing import Any

import pytest

from checks.exact import families
from checks.exact.families import Verdict, judge, quiet, run, table_of
from checks.exact.named_families import NAMED
from checks.exact.small_configs import Family

SMALL = Family("small", "gpt_bigcode")
GPT_OSS = Family("gpt-oss", "gpt_oss")
STABLELM = Family("stablelm", "stablelm")
LATENT = Family("deepseek v2", "deepseek_v2")


def verdict_of(family: Family, is_thorough: bool = False) -> Verdict:
    with quiet():
        return judge(family, is_thorough)


# What is promised


@pytest.mark.exact
@pytest.mark.parametrize("family", NAMED, ids=lambda family: family.name)
def test_a_named_family_passes_every_check_or_is_refused(family: Family) -> None:
    verdict = verdict_of(family, is_thorough=True)
    assert verdict.status == family.expected, verdict.reason
    if family.expected == "exact":
        assert verdict.distinct > 30, "texts that hardly vary show little"
        assert verdict.depends > 8, "texts that depend on their last tokens alone show little"
        assert verdict.checks == 18
    else:
        assert verdict.before_weights


@pytest.mark.exact
def test_no_class_says_what_generate_does_not_or_ends_in_a_traceback() -> None:
    verdicts = run(families.families_of([], "all")[len(NAMED) :])
    wrong = [one for one in verdicts if one.status in ("WRONG", "FAULT")]
    assert not wrong, table_of(wrong)
    not_built = [one for one in verdicts if one.status == "not built"]
    assert len(not_built) < 0.1 * len(verdicts), table_of(not_built)
    assert sum(one.status == "exact" for one in verdicts) > 40


# The check itself


# Of what is common the attention that no other test serves.
@pytest.mark.parametrize(
    "family",
    [SMALL, GPT_OSS, LATENT, pytest.param(STABLELM, marks=pytest.mark.exact)],
    ids=lambda family: family.name,
)
def test_a_family_is_served_and_compared(family: Family) -> None:
    verdict = verdict_of(family)
    assert (verdict.status, verdict.reason, verdict.checks) == ("exact", "", 2)
    assert verdict.accepted > 10
    assert verdict.distinct > 30
    assert verdict.depends > 8


def test_another_text_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    def other(model: Any, prompt: tuple[int, ...], count: int, use_cache: bool = True) -> Any:
        return tuple(range(100, 100 + count))

    monkeypatch.setattr(families, "generated", other)
    verdict = verdict_of(SMALL)
    assert verdict.status == "WRONG"
    assert "off, batch of 4: prompt of 5 tokens, token 0" in verdict.reason


# Small configurations
