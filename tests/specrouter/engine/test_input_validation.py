"""What a caller asks becomes a checked request, or is refused by its field; no model is needed."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import Mock

import pytest
from transformers import PreTrainedTokenizerBase

from modelpool.errors import ConfigError
from specrouter import SLO, RequestError, RouterConfig, SamplingParams, Speculation
from specrouter.engine.context_limit import ContextLengthError
from specrouter.engine.input_validation import MAX_BAD_WORD_IDS as MOST
from specrouter.engine.input_validation import InputValidation
from specrouter.engine.request import PromptLike, Request, args_of_each
from specrouter.request.objective import Objective, Stage
from specrouter.request.spec import MAX_PRIORITY, RequestSpec
from specrouter.request.structure import Structure
from test_support.factories import VOCAB_SIZE, make_tokenizer
from tests.specrouter.fake_router import BASELINE_TPOT_MS, FakeEngine

EOS = 0
MAX_TOKENS = 64
NAMES = ("small", "rules", "big")


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedTokenizerBase:
    return make_tokenizer(tmp_path_factory.mktemp("tokenizer"))


class Pool(SimpleNamespace):
    """The names, the vocabulary and the tokenizer of a pool; `rules` has no weights."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        super().__init__(
            names=NAMES,
            target="big",
            tokenizer=tokenizer,
            vocab_size=VOCAB_SIZE,
            unused_ids=(),
            eos_token_ids=frozenset({EOS}),
            draft_only=("rules",),
            fit_together=lambda chain: True,
        )


class Engine(FakeEngine):
    max_request_tokens = MAX_TOKENS


@pytest.fixture
def pool(tokenizer: PreTrainedTokenizerBase) -> Pool:
    return Pool(tokenizer)


@pytest.fixture
def validation(pool: Pool) -> InputValidation:
    return validation_with(pool, {"batch": {"e2e_ms": 5000}})


def validation_with(pool: Pool, slo_classes: dict[str, Any]) -> InputValidation:
    models = [{"name": name, "source": f"path:/none/{name}"} for name in ("small", "big")]
    config = RouterConfig.load(
        {"pool": {"target": "big", "models": models}, "slo_classes": slo_classes}
    )
    return InputValidation(config, cast(Any, pool), lambda: cast(Any, Engine()))


def args(prompt: PromptLike = (1, 2), slo: Any = None, **more: Any) -> Request:
    """A call's arguments: those of sampling, and those that `Request` has."""
    own = {name: more.pop(name) for name in list(more) if name in Request.__annotations__}
    params = own.pop("params", None) or SamplingParams(**{"max_new_tokens": 4, **more})
    return Request(
        prompt=prompt, params=params, speculation=own.pop("speculation", None), slo=slo, **own
    )


def refused(validation: InputValidation, asked: Request) -> RequestError:
    with pytest.raises(RequestError) as caught:
        validation.accept(asked)
    return caught.value


# What is accepted


def test_a_text_is_read_by_the_tokenizer(
    validation: InputValidation, tokenizer: PreTrainedTokenizerBase
) -> None:
    spec = validation.accept(args("the end"))
    assert spec.token_ids == tuple(tokenizer("the end")["input_ids"])
    assert spec.total_tokens == len(spec.token_ids) + 4


def test_a_request_keeps_what_was_asked(validation: InputValidation) -> None:
    speculation = Speculation(chain=("small", "big"), depth=2)
    asked = args([1, 2], seed=9, speculation=speculation, priority=-3, timeout_s=2.5, generated=[5])
    assert validation.accept(asked) == RequestSpec(
        token_ids=(1, 2),
        generated=(5,),
        params=SamplingParams(max_new_tokens=4, seed=9),
        speculation=speculation,
        seed=9,
        priority=-3,
        timeout_s=2.5,
    )


def test_a_request_without_parameters_has_the_default_ones(validation: InputValidation) -> None:
    error = refused(validation, Request(prompt=[1], params=None, speculation=None, slo=None))
    asked = 1 + SamplingParams().max_new_tokens
    assert error.reason.startswith(f"This model's maximum context length is {MAX_TOKENS} tokens")
    assert f"you requested {asked} tokens" in error.reason


def test_a_request_without_a_seed_draws_one_that_its_samples_share(
    validation: InputValidation,
) -> None:
    one, two = validation.accept_samples(args(n=2, temperature=1.0))
    assert (one.sample, two.sample) == (0, 1)
    assert one.seed == two.seed
    assert one.seed != validation.accept(args()).seed


def test_samples_of_several_prompts_know_their_prompt(validation: InputValidation) -> None:
    accepted = validation.accept_all([args([1], n=2), args([2])])
    assert [(number, spec.token_ids, spec.sample) for number, spec in accepted] == [
        (0, (1,), 0),
        (0, (1,), 1),
        (1, (2,), 0),
    ]


@pytest.mark.parametrize(
    ("slo", "objective"),
    [
        (None, None),
        (
            SLO(tpot_ratio=2),
            Objective(tpot_ms=2 * BASELINE_TPOT_MS, ttft_ms=None, implied_ttft_ms=2000.0),
        ),
        (SLO(tpot_ms=40, ttft_ms=9), Objective(tpot_ms=40.0, ttft_ms=9.0)),
        ("batch", Objective(tpot_ms=None, ttft_ms=None, slo_class="batch", e2e_ms=5000.0)),
    ],
)
def test_an_objective_is_resolved_when_its_request_is_accepted(
    validation: InputValidation, slo: Any, objective: Objective | None
) -> None:
    assert validation.accept(args(slo=slo)).objective == objective


@pytest.mark.parametrize("prompt", ["the <image>", (5, VOCAB_SIZE)])
def test_tokens_that_the_models_do_not_know_are_refused(pool: Pool, prompt: PromptLike) -> None:
    pool.tokenizer = copy.deepcopy(pool.tokenizer)
    pool.tokenizer.add_special_tokens({"additional_special_tokens": ["<image>"]})
    with pytest.raises(RequestError, match=f"from 0 to {VOCAB_SIZE - 1}"):
        validation_with(pool, {}).accept(args(prompt, is_tokenized=True))


def test_a_class_has_the_end_of_its_stages_as_a_text_or_an_id(
    pool: Pool, tokenizer: PreTrainedTokenizerBase
) -> None:
    def stages(end: str | int) -> tuple[Stage, ...]:
        classes = {"think": {"stages": [{"tpot_ms": 20, "until_token": end}, {"tpot_ms": 60}]}}
        return validation_with(pool, classes).slo_classes["think"].stages

    [token] = tokenizer(")", add_special_tokens=False)["input_ids"]
    assert stages(")") == stages(token) == (Stage(20, until_token=token), Stage(60))
    for end in (") and more", "", len(tokenizer)):
        with pytest.raises(ConfigError) as caught:
            stages(end)
        assert caught.value.field == "slo_classes.think.stages[0].until_token"


# What is refused


def test_stages_are_part_of_the_objective(validation: InputValidation) -> None:
    slo = SLO(stages=(Stage(20.0, until_tokens=8), Stage(60.0)))
    objective = validation.accept(args(slo=slo)).objective
    assert objective is not None
    assert (objective.tpot_ms, objective.stages) == (None, slo.stages)


LETTER = ((3,),)  # one banned id


@pytest.mark.parametrize(
    ("field", "asked", "reason"),
    [
        ("prompt", {"prompt": ""}, "empty"),
        ("prompt", {"prompt": "\ud800"}, "surrogate"),
        ("prompt", {"prompt": "x " * 300}, "maximum context length"),
        ("prompt", {"prompt": [1] * MAX_TOKENS}, "maximum context length"),
        ("input_ids", {"prompt": []}, "empty"),
        ("input_ids", {"prompt": [VOCAB_SIZE]}, "from 0"),
        ("input_ids", {"prompt": [-1]}, "from 0"),
        ("input_ids", {"prompt": [1.5]}, "list of token ids"),
        ("input_ids", {"prompt": [True]}, "list of token ids"),
        ("input_ids", {"prompt": ["1"]}, "list of token ids"),
        ("input_ids", {"prompt": 7}, "list of token ids"),
        ("params", {"params": {"max_new_tokens": 4}}, "SamplingParams"),
        ("priority", {"priority": MAX_PRIORITY + 1}, "at most"),
        ("priority", {"priority": -MAX_PRIORITY - 1}, "at least"),
        ("priority", {"priority": 0.5}, "whole number"),
        ("priority", {"priority": True}, "whole number"),
        ("timeout_s", {"timeout_s": 0}, "above 0"),
        ("generated", {"generated": [VOCAB_SIZE]}, "from 0"),
        ("max_new_tokens", {"generated": [1, 2, 3, 4]}, "already"),
        ("sample", {"sample": 2, "n": 2}, "at most 1"),
        ("sample", {"sample": -1}, "at least 0"),
        ("elapsed_s", {"elapsed_s": -1.0}, "above 0"),
        ("arrivals", {"generated": [1, 2], "arrivals": ((0.1, 1),)}, "of all tokens"),
        ("speculation", {"speculation": "on"}, "None"),
        ("speculation.chain", {"speculation": Speculation(chain=("tiny", "big"))}, "'tiny'"),
        ("speculation.chain", {"speculation": Speculation(chain=("small",))}, "end in the target"),
        (
            "speculation.chain",
            {"speculation": Speculation(chain=("small", "rules", "big"))},
            "stand first",
        ),
        ("prediction", {"speculation": Speculation(prediction=[10**6])}, "from 0"),
        ("prediction", {"speculation": Speculation(prediction=cast(Any, ["a"]))}, "token ids"),
        ("prediction", {"speculation": Speculation(prediction="\ud800")}, "surrogate"),
        ("slo", {"slo": "urgent"}, "'urgent'"),
        (
            "slo.stages[0].until_token",
            {"slo": SLO(stages=(Stage(20.0, until_token=10**6), Stage(60.0)))},
            "",
        ),
        ("structure", {"structure": Structure("regex", "(")}, ""),
        ("stop_token_ids", {"stop_token_ids": (VOCAB_SIZE,)}, f"below {VOCAB_SIZE}"),
        ("logit_bias", {"logit_bias": {VOCAB_SIZE: 1.0}}, f"below {VOCAB_SIZE}"),
        ("bad_words_ids", {"bad_words_ids": ((3, VOCAB_SIZE),)}, f"below {VOCAB_SIZE}"),
        ("bad_words_ids", {"bad_words_ids": ((EOS,),)}, "min_tokens"),
        ("bad_words_ids", {"bad_words_ids": ((EOS,),), "ignore_eos": True}, "min_tokens"),
        ("bad_words", {"bad_words": ("<|endoftext|>",)}, "min_tokens"),
        ("bad_words", {"bad_words": ("fine", "  ")}, "'  ' has no tokens"),
        # Too many, even where they can never come about.
        ("bad_words", {"bad_words": ("Z " * MOST,)}, f"at most {MOST}"),
        ("bad_words_ids", {"bad_words_ids": ((3,) * (MOST + 1),)}, f"at most {MOST}"),
        ("bad_words_ids", {"bad_words_ids": LETTER * (MOST + 1)}, f"at most {MOST}"),
        ("bad_words_ids", {"bad_words": "Z", "bad_words_ids": LETTER * MOST}, f"at most {MOST}"),
    ],
)
def test_what_is_wrong_is_refused_by_its_name(
    validation: InputValidation, field: str, asked: dict[str, Any], reason: str
) -> None:
    error = refused(validation, args(**asked))
    assert error.field == field
    assert reason in error.reason


def test_one_sample_may_be_asked_for_and_what_is_generated_is_of_one(
    validation: InputValidation,
) -> None:
    [alone] = validation.accept_samples(args(n=3, sample=2, generated=[5]))
    assert (alone.sample, alone.generated) == (2, (5,))
    assert [one.sample for one in validation.accept_samples(args(n=3))] == [0, 1, 2]
    with pytest.raises(RequestError, match="say which"):
        validation.accept_samples(args(n=3, generated=[5]))


def test_a_chain_that_never_fits_in_memory_together_is_refused(
    validation: InputValidation, pool: Pool
) -> None:
    pool.fit_together = lambda chain: chain != ("small", "big")
    asked = args(speculation=Speculation(chain=("small", "big")))
    assert refused(validation, asked).field == "speculation.chain"


def test_a_request_that_is_too_long_is_told_what_fits(validation: InputValidation) -> None:
    error = refused(validation, args([1] * 60, max_new_tokens=5))
    assert isinstance(error, ContextLengthError)
    assert error.field == "max_new_tokens"
    assert error.reason.endswith("(60 in the prompt, 5 in the completion): at most 4 new ones fit")
    assert validation.accept(args([1] * 60)).total_tokens == MAX_TOKENS


def test_the_refused_one_of_several_prompts_is_named(validation: InputValidation) -> None:
    with pytest.raises(RequestError) as caught:
        validation.accept_all([args(), args([])])
    assert caught.value.field == "input_ids[1]"
    with pytest.raises(RequestError, match=r"\(prompt 1\)$") as caught:
        validation.accept_all([args(), args(priority=MAX_PRIORITY + 1)])
    assert caught.value.field == "priority"


# Several prompts


def each(
    prompts: Any, params: Any = None, speculation: Any = None, slo: Any = None
) -> list[Request]:
    return args_of_each(prompts, params, speculation, slo, 0, None)


@pytest.mark.parametrize(
    ("prompts", "several"),
    [
        ("one text", ["one text"]),
        ([1, 2], [[1, 2]]),
        (["a", [1, 2]], ["a", [1, 2]]),
        ([], []),
    ],
)
def test_one_prompt_is_a_list_of_one(prompts: Any, several: Sequence[Any]) -> None:
    assert [one.prompt for one in each(prompts)] == several


def test_an_option_is_for_all_prompts_or_for_each() -> None:
    greedy, other = SamplingParams(), SamplingParams(temperature=1.0)
    assert [one.params for one in each(["a", "b"], params=greedy)] == [greedy, greedy]
    assert [one.params for one in each(["a", "b"], params=[greedy, other])] == [greedy, other]
    assert [one.slo for one in each(["a", "b"], slo=["batch", None])] == ["batch", None]


@pytest.mark.parametrize(
    ("field", "prompts", "more"),
    [
        ("prompts", 7, {}),
        ("params", ["a", "b"], {"params": [SamplingParams()]}),
        ("slo", ["a"], {"slo": 50}),
        ("speculation", ["a"], {"speculation": ["off", "off"]}),
    ],
)
def test_options_that_do_not_match_the_prompts_are_refused(
    field: str, prompts: Any, more: dict[str, Any]
) -> None:
    with pytest.raises(RequestError) as caught:
        each(prompts, **more)
    assert caught.value.field == field


# Banned words


def ids_of(tokenizer: PreTrainedTokenizerBase, text: str) -> tuple[int, ...]:
    return tuple(tokenizer(text)["input_ids"])


def banned(validation: InputValidation, **params: Any) -> tuple[tuple[int, ...], ...]:
    """What the engine is told to leave out of the output."""
    return validation.accept(args(max_new_tokens=1, **params)).bad_words_ids


def test_a_bad_word_is_banned_with_and_without_its_space(
    validation: InputValidation, tokenizer: PreTrainedTokenizerBase
) -> None:
    plain, spaced = ids_of(tokenizer, "the"), ids_of(tokenizer, " the")
    assert len(plain) == len(spaced)
    assert plain[0] != spaced[0]
    assert banned(validation, bad_words=("the",)) == (plain, spaced)
    assert banned(validation, bad_words=(" the",)) == (plain, spaced)


def test_a_space_that_is_a_token_of_its_own_adds_nothing(
    validation: InputValidation, tokenizer: PreTrainedTokenizerBase
) -> None:
    plain, spaced = ids_of(tokenizer, "Z"), ids_of(tokenizer, " Z")
    assert len(spaced) > len(plain)
    assert banned(validation, bad_words=("Z",)) == (plain,)


def test_banned_ids_come_after_the_banned_texts(
    validation: InputValidation, tokenizer: PreTrainedTokenizerBase
) -> None:
    sequences = ((3, EOS), (7,))
    found = banned(validation, bad_words=("Z",), bad_words_ids=sequences)
    assert found == (ids_of(tokenizer, "Z"), *sequences)


def test_the_bad_words_of_several_prompts_are_read_once(
    validation: InputValidation, pool: Pool
) -> None:
    pool.tokenizer = reading = Mock(wraps=pool.tokenizer)
    asked = [args([number], bad_words=("the",)) for number in (1, 2, 3)]
    accepted = validation.accept_all(asked)
    assert [call.args[0] for call in reading.call_args_list] == ["the", " the"]
    assert len({spec.bad_words_ids for _, spec in accepted}) == 1


def test_a_phrase_that_the_text_will_never_be_long_enough_for_is_left_out(
    validation: InputValidation,
) -> None:
    # Two ids of the prompt, and a new one.
    sequences = ((1, 2, 3), (1, 2, 3, 4), (3,))
    assert banned(validation, bad_words_ids=sequences) == ((1, 2, 3), (3,))


def test_so_many_banned_ids_are_taken(validation: InputValidation) -> None:
    pairs = ((3, 4),) * (MOST // 2)
    assert banned(validation, bad_words_ids=pairs) == pairs


# Predictions


@pytest.mark.parametrize("text", ["def fib", list(b"abc"), ""])
def test_a_prediction_is_read_and_overrides_nothing(
    text: str | list[int], validation: InputValidation, tokenizer: PreTrainedTokenizerBase
) -> None:
    speculation = Speculation(prediction=text)
    accepted = validation.accept(args("a", speculation=speculation))
    wanted = tokenizer(text)["input_ids"] if isinstance(text, str) else text
    assert (accepted.speculation, accepted.predicted) == (None, tuple(wanted))


def test_a_prediction_goes_with_an_override(validation: InputValidation) -> None:
    speculation = Speculation(depth=3, prediction=[5])
    accepted = validation.accept(args("a", speculation=speculation))
    assert (accepted.speculation, accepted.predicted) == (Speculation(depth=3), (5,))


def test_of_a_prediction_that_no_output_can_hold_the_beginning_is_read(
    validation: InputValidation,
) -> None:
    accepted = validation.accept(args("a", speculation=Speculation(prediction="b" * 10**6)))
    assert len(accepted.predicted) == MAX_TOKENS


def test_a_prediction_without_a_drafter_to_read_it_is_left_out(
    pool: Pool, validation: InputValidation
) -> None:
    pool.draft_only = ()
    accepted = validation.accept(args("a", speculation=Speculation(prediction="b")))
    assert (accepted.speculation, accepted.predicted) == (None, ())


def test_a_prediction_is_a_list_or_a_text() -> None:
    with pytest.raises(RequestError, match=r"^prediction: must be a list"):
        Speculation(prediction=cast(Any, 3))
