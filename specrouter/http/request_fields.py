"""Fields of every request for a text, and the body of `POST /generate`, which has our own names.

Contract: types and ranges are checked here, so that the API's schema shows them; what depends on
several fields or on the models is checked by `SamplingParams` and the router. A field that is null
or absent has its default. Unknown fields are accepted, because existing clients send fields that we
do not have. Unsupported fields of OpenAI and vLLM that would change the text or its
log-probabilities are refused, and so are other servers' names for structures. No existing client
sends `speculation` or the body of `/generate`, which are our own: an unknown key there is an error.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field

from specrouter.http.structure_fields import StructureFields
from specrouter.request.fields import (
    MOST,
    Count,
    OwnFields,
    Positive,
    Refused,
    Text,
    TokenIds,
    Tokens,
    check_refused,
    refused,
)
from specrouter.request.params import (
    LEAST_TEMPERATURE,
    MAX_SALT_CHARACTERS,
    Bias,
    Depth,
    LogprobCount,
    MinP,
    Penalty,
    RepetitionPenalty,
    RequestError,
    Samples,
    SamplingParams,
    Speculation,
    Temperature,
    TopP,
    Width,
)
from specrouter.request.slo_fields import SloFields
from specrouter.request.spec import MAX_PRIORITY

MAX_STOPS = 64  # each is searched for after every token
MAX_STOP_CHARACTERS = 4096  # in total: a search for partial matches takes quadratic time
MAX_BAD_WORDS = 1024
MAX_BIASES = 16_384  # ids of `logit_bias`
MAX_STOP_IDS = 16_384

_LARK = "is not known here: use structured_outputs.grammar, in Lark's notation"
_SAMPLING_FIELDS = {field.name for field in fields(SamplingParams)} - {"logits_processors"}


def _short(stops: str | list[str]) -> str | list[str]:
    if sum(map(len, [stops] if isinstance(stops, str) else stops)) > MAX_STOP_CHARACTERS:
        raise ValueError(f"must have at most {MAX_STOP_CHARACTERS} characters in all")
    return stops


Stops = Annotated[Text | Annotated[list[Text], Field(max_length=MAX_STOPS)], AfterValidator(_short)]


class SpeculationRequest(OwnFields):
    """A chain (weakest model first, the target last), a draft depth, and the token tree's width.

    The router decides what is null.
    """

    chain: list[Text] | None = None
    """Names of models, weakest first, the target last."""
    depth: Depth | None = None
    """Tokens drafted one after another in a decoding cycle."""
    width: Width | None = None
    """Branches of the token tree on each level; depth times width is at most 64."""
    reuse_outputs: bool | None = None
    """False: no earlier output is quoted in drafts for it, and its own is not kept for later
    ones."""


class RequestFields(StructureFields):
    """Fields common to `/generate`, `/v1/completions` and `/v1/chat/completions`."""

    model: Text | None = None
    """The target's name; left out or empty, it is the target."""
    temperature: Temperature | None = None
    """0 is greedy. By default 1 at OpenAI's endpoints and 0 at `/generate`."""
    top_k: Annotated[int, Field(ge=-1, le=MOST)] | None = None
    """Sample among the k most probable tokens; 0 and -1 are off."""
    top_p: TopP | None = None
    """Sample among the most probable tokens that together have this probability."""
    min_p: MinP | None = None
    """Leave out tokens below this share of the most probable token's probability."""
    repetition_penalty: RepetitionPenalty | None = None
    """For tokens of the prompt and the output; above 1 discourages them."""
    presence_penalty: Penalty | None = None
    """Subtracted once from tokens that are in the output."""
    frequency_penalty: Penalty | None = None
    """Subtracted from tokens of the output as often as they are in it."""
    logit_bias: Annotated[dict[str, Bias], Field(max_length=MAX_BIASES)] | None = None
    """Added to the logits, by token id (as text)."""
    seed: Annotated[int, Field(ge=-(2**63), lt=2**64)] | None = None
    """The same seed gives the same tokens; -1 is none, other negative ones count modulo 2^64."""
    n: Samples | None = None
    """Samples of each prompt."""
    stop: Stops | None = None
    """The output ends before any of these texts."""
    stop_token_ids: Annotated[TokenIds, Field(max_length=MAX_STOP_IDS)] | None = None
    """The output ends at any of these token ids."""
    ignore_eos: bool | None = None
    """Go on after the end-of-text token."""
    min_tokens: Count | None = None
    """No end-of-text token, none of `stop_token_ids` and no end by `stop` before so many tokens."""
    bad_words: Annotated[list[Text], Field(max_length=MAX_BAD_WORDS)] | None = None
    """Texts that are never generated."""
    bad_words_ids: Annotated[list[TokenIds], Field(max_length=MAX_BAD_WORDS)] | None = None
    """The same, as lists of token ids."""
    include_stop_str_in_output: bool | None = None
    """The output includes the `stop` text that ended it."""
    skip_special_tokens: bool | None = None
    """False shows special tokens in the output; true by default."""
    prompt_logprobs: LogprobCount | None = None
    """Log-probabilities of the prompt's tokens, with so many alternatives."""
    prefix_cache: bool | None = None
    """False: the prompt is read whole, and nothing of the request is kept; true by default."""
    cache_salt: Annotated[Text, Field(min_length=1, max_length=MAX_SALT_CHARACTERS)] | None = None
    """Requests share cached prefixes under the same salt; by default those of one API key do."""
    receipt: bool | None = None
    """True: the answer has a receipt, by which `specrouter verify` computes its text again;
    log-probabilities come with it."""
    priority: Annotated[int, Field(ge=-MAX_PRIORITY, le=MAX_PRIORITY)] | None = None
    """Of those that wait, the lower number is admitted first; one step is worth ten seconds."""
    timeout_s: Positive | None = None
    """The request ends with 408 after so many seconds, waiting included."""
    speculation: Literal["off"] | SpeculationRequest | None = None
    """`off`: the target alone. An object: chain, depth, width. Null: the router decides."""
    slo: Text | SloFields | None = None
    """Latency objectives: the name of a class of the configuration, or values."""
    stream: bool | None = None
    """Answer with server-sent events; an event may hold several tokens."""
    allowed_token_ids: Refused = refused(
        "is not supported: logit_bias, bad_words and structures are"
    )
    ebnf: Refused = refused(_LARK)
    grammar: Refused = refused(_LARK)
    guided_whitespace_pattern: Refused = refused(
        "is not known here: use structured_outputs, with json and whitespace_pattern"
    )
    json_schema: Refused = refused("is not known here: use structured_outputs.json")
    logits_processors: Refused = refused(
        "is Python code: give it to ChainRouter, or use logit_bias and bad_words"
    )
    logprob_token_ids: Refused = refused("is not supported: logprobs has the most likely ones")
    regex: Refused = refused("is not known here: use structured_outputs.regex")
    repetition_detection: Refused = refused("is not supported: penalties and bad_words are")
    return_tokens_as_token_ids: Refused = refused("is not supported: use return_token_ids")
    stop_regex: Refused = refused("is not supported: stop and stop_token_ids are")
    structural_tag: Refused = refused(
        "is not supported: the whole text has a form, see structured_outputs"
    )
    thinking_token_budget: Refused = refused(
        "is not supported: max_tokens limits all of a text", neutral=-1
    )
    truncate_prompt_tokens: Refused = refused("is not supported: a prompt is read whole")
    use_beam_search: Refused = refused(
        "is not supported: best_of returns the likeliest of several texts"
    )

    @property
    def samples(self) -> int:
        """Number of texts that the router makes of each prompt."""
        return self.n or 1

    def field_names(self) -> dict[str, str]:
        """Return this body's names for fields of `SamplingParams` and the router."""
        return {"structure": self.asked_structure[1]}

    @property
    def has_structure(self) -> bool:
        """True if there is a grammar to compile; raises `RequestError`."""
        return self.asked_structure[0] is not None

    def check(self) -> None:
        """Raise `RequestError` for fields that are refused, or contradict one another."""
        check_refused(self)

    def sampling_params(self, defaults: Mapping[str, Any], **own: Any) -> SamplingParams:
        """Return the sampling parameters of the fields that were given.

        `own` values replace fields of the same name; `defaults` apply to those not given.

        Raises:
            RequestError: names the field as `SamplingParams` does.
        """
        asked = {name: getattr(self, name, None) for name in _SAMPLING_FIELDS} | own
        told = {name: one for name, one in asked.items() if one is not None}
        given: dict[str, Any] = {**defaults, **told}
        if self.seed == -1:  # vLLM's clients send it for no seed
            del given["seed"]
        elif self.seed is not None:
            given["seed"] = self.seed % 2**64
        if 0.0 < given.get("temperature", 0.0) < LEAST_TEMPERATURE:
            given["temperature"] = 0.0
        if given.get("top_k") == -1:
            given["top_k"] = 0
        return SamplingParams(**given)

    def speculation_override(self) -> Literal["off"] | Speculation | None:
        if self.speculation is None or self.speculation == "off":
            return self.speculation
        asked = self.speculation
        chain = None if asked.chain is None else tuple(asked.chain)
        reuses = asked.reuse_outputs is not False
        return Speculation(chain, asked.depth, asked.width, reuse_outputs=reuses)


class GenerateRequest(RequestFields, OwnFields):
    """Body with exactly one of `prompt` and `input_ids`; unknown fields are refused."""

    model: Text | None = None
    """The target's name; another one is answered with 404."""
    prompt: Text | None = None
    """A text; either it or `input_ids`."""
    input_ids: TokenIds | None = None
    """Token ids; either they or `prompt`."""
    max_new_tokens: Tokens | None = None
    """Tokens of the output, at most; 128 by default."""
    logprobs: LogprobCount | None = None
    """Log-probabilities of the output's tokens, with so many alternatives."""
    return_drafts: bool | None = None
    """Of every cycle: who proposed which token, and the drafted tree that the target verified."""
    # OpenAI's name is refused, so that it is not ignored silently.
    max_tokens: Refused = refused("this endpoint calls it max_new_tokens")

    def source(self) -> str | list[int]:
        """Return the prompt as it was given; `RequestError` unless there is exactly one."""
        if self.prompt is not None and self.input_ids is not None:
            raise RequestError("input_ids", "give either prompt or input_ids, not both")
        if self.prompt is not None:
            return self.prompt
        if self.input_ids is not None:
            return self.input_ids
        raise RequestError("prompt", "missing: give prompt (text) or input_ids (token ids)")
