"""LLM: one line of Python serves what the command line serves, and cleans up after itself."""

from __future__ import annotations

import asyncio
import gc
import html
import json
import math
import random
import re
import subprocess
import sys
import weakref
from collections.abc import Iterator
from dataclasses import replace
from math import comb
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specrouter import (
    LLM,
    ConfigError,
    RequestError,
    SamplingParams,
    Speculation,
    UnavailableError,
)
from specrouter.cli.main import _parser
from specrouter.cli.target import read_asked
from specrouter.llm import _asked
from specrouter.notebook import PAIRS, Comparison, Text, median_interval
from specrouter.progress import Progress
from specrouter.request.output import CycleDraft, RequestMetrics
from test_support.factories import save_llama

ROOT = Path(__file__).resolve().parents[2]
VALUES = {
    "max_model_len": 300,
    "max_requests": 3,
    "generation_defaults": "model",
    "fresh_times": True,
}
OF_THE_SERVICE = {"host", "port", "log_format", "api_key"}
NO_SETTING = {"target", "config", "draft", "settings", "run", "log_level"}


@pytest.fixture(scope="module")
def arguments(small_family: dict[str, Path]) -> dict[str, Any]:
    """A target and a drafter."""
    *_, target = (str(path) for path in small_family.values())
    return {"target": target, "draft": str(small_family["small"])}


@pytest.fixture(scope="module")
def kept() -> Iterator[list[LLM]]:
    """Of the module's tests, the one that was opened last."""
    opened = list[LLM]()
    yield opened
    for one in opened:
        one.close()


@pytest.fixture
def llm(kept: list[LLM], arguments: dict[str, Any]) -> LLM:
    """Opened again where a test has opened another one."""
    if not kept or "closed" in repr(kept[-1]):
        kept[:] = [LLM(**arguments, max_requests=4, set={"engine.preload": False})]
    return kept[-1]


def test_keywords_are_the_command_line_s_options(arguments: dict[str, Any]) -> None:
    parsed = _parser().parse_args(["serve"])
    assert {*vars(parsed)} - OF_THE_SERVICE - NO_SETTING == VALUES.keys()
    argv = [arguments["target"], "--draft", arguments["draft"], "--set", "trees.budget_tokens=2"]
    for name, value in VALUES.items():
        argv += [f"--{name.replace('_', '-')}", *([str(value)] if value is not True else [])]
    by_command = read_asked(_parser().parse_args(["serve", *argv]))
    target, draft = Path(arguments["target"]), [arguments["draft"]]
    assert _asked(target, draft, {"trees.budget_tokens": 2}, VALUES).config == by_command.config
    assert _asked(None, None, {}, {}).config == read_asked(parsed).config


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"target": "nothing-here"}, "target: 'nothing-here' is no folder"),
        ({"target": "tiny-3m", "draft": "none-such"}, "draft none-such: 'none-such' is no"),
        ({"target": "tiny", "draft": "tiny-1m"}, "draft: goes with a model"),
        ({"draft": 3}, "draft: must be a name"),
        ({"max_model_length": 3}, "max_model_length: is no option: there are max_model_len,"),
        ({"max_requests": 0}, "max_requests: "),
        ({"generation_defaults": "mine"}, "generation_defaults: "),
        ({"set": {"engine.rows": 1}}, "set engine.rows: unknown key"),
    ],
)
def test_a_bad_argument_is_named_before_anything_is_closed(
    llm: LLM, given: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        LLM(**given)
    assert str(refused.value).startswith(message)
    assert "\n" not in str(refused.value)
    assert llm.router.is_healthy


@pytest.mark.parametrize("progress", [None, True])
def test_what_is_loaded_is_shown_on_a_terminal_and_where_it_is_asked_for(
    progress: bool | None, arguments: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = list[str]()
    monkeypatch.setattr(Progress, "show", lambda _, text, **__: shown.append(text))
    LLM(arguments["target"], max_model_len=64, progress=progress).close()
    assert any(re.match(r"loading .* of .* MB", line) for line in shown) is (progress is True)


def test_texts_are_the_router_s_in_a_script_and_in_a_running_event_loop(llm: LLM) -> None:
    params = SamplingParams(max_new_tokens=12, temperature=1.0, seed=4, ignore_eos=True)
    expected = [one.token_ids for one in llm.router.generate(["ab", "c"], params)]
    sampling: dict[str, Any] = {"temperature": 1.0, "seed": 4, "ignore_eos": True}

    async def inside() -> list[list[int]]:
        return [one.token_ids for one in llm.generate(["ab", "c"], max_tokens=12, **sampling)]

    assert asyncio.run(inside()) == expected
    assert [one.token_ids for one in llm.generate(["ab", "c"], params)] == expected
    [shorter] = llm.generate("ab", params, max_tokens=5)
    assert shorter.token_ids == expected[0][:5]
    [whole] = llm.generate("ab", params, max_tokens=None)
    assert whole.token_ids == expected[0]
    with pytest.raises(RequestError, match="prompt"):
        llm.stream("", params)  # before its first part is asked for
    parts = [part.token_ids for part in llm.stream("ab", params)]
    assert [token for part in parts for token in part] == expected[0]


def test_a_chat_takes_a_message_or_a_conversation(llm: LLM) -> None:
    said = [{"role": "user", "content": "ab"}]
    assert llm.chat("ab", max_tokens=4).token_ids == llm.chat(said, max_tokens=4).token_ids
    with pytest.raises(RequestError, match="messages"):
        llm.chat([])


@pytest.mark.parametrize("call", ["generate", "chat", "stream", "compare"])
@pytest.mark.parametrize("params", [None, SamplingParams()])
@pytest.mark.parametrize("given", [("temperature", -1), ("temprature", 1), ("return_drafts", 0)])
def test_a_bad_parameter_is_named_at_the_call(
    llm: LLM, call: str, params: SamplingParams | None, given: tuple[str, Any]
) -> None:
    with pytest.raises(RequestError, match=rf"^{given[0]}: (must be|is )"):
        getattr(llm, call)("a", params, **dict([given]))
    with pytest.raises(RequestError, match=r"^params: must be SamplingParams, not 5"):
        getattr(llm, call)("a", 5)


def test_what_is_on_may_be_asked_for_and_a_comparison_is_of_one_prompt(llm: LLM) -> None:
    [text] = llm.generate("a", SamplingParams(max_new_tokens=2), return_drafts=True)
    assert text.drafts
    for prompts in (["a", "b"], [[5, 6], [7]], ["a"], [], None):
        with pytest.raises(RequestError, match=r"^prompt: must be one text"):
            llm.compare(prompts)  # type: ignore[arg-type]
    assert llm.compare([5, 6], max_tokens=2).equal


def test_a_comparison_is_of_the_same_request(llm: LLM) -> None:
    found = llm.compare("abc", max_tokens=24, temperature=1.0, ignore_eos=True)
    assert found.equal
    assert len(found.ratios) in PAIRS
    assert found.routed.seed == found.alone.seed
    assert {len(chain) for chain in found.alone.metrics.chains} == {1}
    assert found.routed.metrics.cached_tokens == found.alone.metrics.cached_tokens == 0
    assert str(found).startswith(f"{found.verdict}\n  with: ")
    assert html.escape(str(found)) in found._repr_html_()


@pytest.mark.parametrize(
    ("ratios", "told"),
    [
        ((1.3, 1.4) * 3 + (1.1, 1.5), "1.35 times as fast with speculation (1.10 to 1.50)"),
        ((1.3, 1.4) * 3 + (0.9, 1.5), "no difference in speed measurable (0.90 to 1.50)"),
        ((0.8,) * 14 + (3.0,) * 2, "0.80 times as fast with speculation (0.80 to 0.80)"),
        ((0.8,) * 7, "too few runs to say how fast"),
    ],
)
def test_what_is_said_of_speeds_has_a_spread(ratios: tuple[float, ...], told: str) -> None:
    routed, alone = text_of(["a", "b"]), text_of(["a", "b"])
    assert Comparison(routed, alone, ratios).verdict.partition(";")[0] == f"equal, {told}"
    assert not Comparison(routed, text_of(["a"]), ratios).verdict.startswith("equal")


@pytest.mark.parametrize("count", range(1, 41))
def test_an_interval_of_the_median_is_the_narrowest_that_holds_in_127_of_128(count: int) -> None:
    def outside(rank: int) -> float:
        """How often more than half of all that could come lie beyond the values of a rank."""
        return 2.0 * sum(comb(count, each) for each in range(rank + 1)) / 2.0**count

    found = median_interval([float(value) for value in range(count)])
    if found is None:
        assert outside(0) > 1 / 128
    else:
        low, high = map(int, found)
        assert high == count - 1 - low
        assert outside(low) <= 1 / 128 < outside(low + 1)


@pytest.mark.parametrize("slower", [0.0, 0.15])
def test_a_slowdown_is_found_and_none_is_not(
    slower: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In 18 of 20 comparisons, on a machine whose neighbours take bursts of several answers."""
    draws = random.Random(3)
    monkeypatch.setattr("specrouter.llm.secrets.randbits", draws.getrandbits)
    burst = 0.0

    def generate(prompt: object, params: object, speculation: object) -> list[Text]:
        nonlocal burst
        burst = draws.choice([0.0, 0.2]) if draws.random() < 0.1 else burst
        e2e_ms = 100.0 * (1.0 + burst) * math.exp(0.04 * draws.gauss(0, 1))
        e2e_ms *= 1.0 if speculation == "off" else 1.0 + slower
        text = text_of(["a", "b"])
        return [replace(text, metrics=replace(text.metrics, e2e_ms=e2e_ms))]

    llm: Any = LLM.__new__(LLM)
    llm._router = SimpleNamespace(generate=generate, sampling_defaults={})
    found = [llm.compare("a") for _ in range(20)]
    told = "no difference" if not slower else "0."
    assert sum(f"equal, {told}" in one.verdict for one in found) >= 18


def test_coloured_tokens_sum_to_the_text(llm: LLM) -> None:
    chain = tuple(name for name in llm.router.pool.names if name != "ngram")
    [text] = llm.generate("ab", speculation=Speculation(chain, depth=4), max_tokens=24)
    tokens = list(text.tokens)
    assert len(tokens) == len(text.token_ids)
    assert "".join(piece for piece, _, _ in tokens) == text.text
    assert {model for _, model, _ in tokens} == {*chain}
    shown = text._repr_html_()
    body = shown[: shown.index("</div>")]
    assert html.unescape(re.sub("<[^>]*>", "", body)) == text.text
    assert f"{chain[-1]} {sum(model == chain[-1] for _, model, _ in tokens)}" in shown


def text_of(pieces: list[str], model: str = "small", target: str = "big") -> Text:
    draft = CycleDraft(
        chain=(model, target),
        tokens=tuple(range(len(pieces))),
        proposers=(0,) * len(pieces),
        accepted=tuple(range(len(pieces))),
        texts=tuple(pieces),
        cycle=1,
    )
    metrics = RequestMetrics(
        ttft_ms=None, tpot_ms=None, acceptance_length=1.0, cycles=1, chains={(model, target): 1},
        prompt_tokens=1, output_tokens=len(pieces),
    )  # fmt: skip
    return Text(
        text="".join(pieces), token_ids=list(range(len(pieces))), finish_reason="length",
        metrics=metrics, seed=0, drafts=[draft],
    )  # fmt: skip


def test_a_failure_is_told_with_the_figures() -> None:
    line = replace(text_of(["a"]), error="no memory").figures
    assert line == (
        "1 tokens (length) | acceptance length 1.00 | small>big 100% | seed 0 | no memory"
    )


@given(st.lists(st.text(alphabet="<>&\"'a\n é"), max_size=4), st.text("<\"'&b", min_size=1))
def test_markup_in_a_text_or_a_name_stays_text(pieces: list[str], name: str) -> None:
    shown = text_of(pieces, f"s{name}", f"t{name}")._repr_html_()
    tags = re.findall(r"<(/?\w+)(?: (?:style|title)=\"[^\"<>]*\")*>", shown)
    assert shown.count("<") == len(tags)
    assert {*tags} <= {"div", "/div", "span", "/span", "br"}


def test_the_next_one_closes_the_one_before_and_its_models_are_gone(
    llm: LLM, arguments: dict[str, Any]
) -> None:
    pool = weakref.ref(llm.router.pool)
    with LLM(arguments["target"], set={"engine.preload": False}) as second:
        gc.collect()
        assert pool() is None
        with pytest.raises(UnavailableError, match="the next one"):
            llm.generate("a")
        assert second.generate("a", max_tokens=1)
    assert repr(second) == "LLM(closed)"
    second.close()


def test_what_is_held_of_one_keeps_it_open_and_nothing_else_does(arguments: dict[str, Any]) -> None:
    def opened() -> LLM:
        return LLM(arguments["target"], set={"engine.preload": False})

    parts = opened().stream("ab", max_tokens=8, ignore_eos=True)
    assert sum(len(part.token_ids) for part in parts) == 8
    router = opened().router
    assert len(router.generate("ab", SamplingParams(max_new_tokens=3, ignore_eos=True))) == 1
    thread = router._thread
    del router
    gc.collect()
    assert not thread.is_healthy


def test_a_request_of_8000_tokens_needs_no_setting(tmp_path: Path) -> None:
    path = save_llama(tmp_path / "model", hidden=16, layers=1, heads=1, kv_heads=1, dtype="float32")
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 8192}))
    with LLM(path) as long:
        [text] = long.generate([[5 + number % 200 for number in range(7990)]], max_tokens=10)
    assert text.metrics.prompt_tokens + text.metrics.output_tokens == 8000


_TWICE = """
import ctypes, resource, sys
from specrouter import LLM

def resident() -> int:
    ctypes.CDLL(None).malloc_trim(0)
    return int(open("/proc/self/statm").read().split()[1]) * resource.getpagesize()

def open_and_use() -> int:
    global llm
    llm = LLM(sys.argv[1], set={"engine.preload": False})
    llm.generate("abc", max_tokens=4)
    return resident()

before = resident()
first, second = open_and_use(), open_and_use()
print(before, first, second)
"""


@pytest.mark.long
def test_memory_after_two_is_that_after_one_and_the_interpreter_ends(tmp_path: Path) -> None:
    path = save_llama(tmp_path / "model", hidden=512, layers=12, heads=8, kv_heads=8)
    done = subprocess.run(
        [sys.executable, "-c", _TWICE, str(path)],
        cwd=ROOT, capture_output=True, text=True, timeout=300, check=True,
    )  # fmt: skip
    before, first, second = map(int, done.stdout.split())
    assert first - before > 100 * 2**20, "weights are what is measured"
    assert second - before < 1.1 * (first - before)
