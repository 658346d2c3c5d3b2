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
    """Model names, weakest first, the target last."""
    depth: Depth | None = None
    """Levels of the draft tree."""
    width: Width | None = None
    """Alternatives per level of the draft tree; depth times width is at most 64."""
    reuse_outputs: bool | None = None
    """`false` neither drafts from earlier outputs nor keeps this one for later drafts."""


class RequestFields(StructureFields):
    """Fields common to `/generate`, `/v1/completions` and `/v1/chat/completions`."""

    model: Text | None = None
    """Name of the target; may be absent or empty."""
    temperature: Temperature | None = None
    """Sampling temperature; 0 is greedy. By default 1 at OpenAI's endpoints and 0 at
    `/generate`."""
    top_k: Annotated[int, Field(ge=-1, le=MOST)] | None = None
    """Samples only the k most probable tokens; 0 and -1 turn it off."""
    top_p: TopP | None = None
    """Samples only the most probable tokens that together have this probability."""
    min_p: MinP | None = None
    """Excludes tokens below this share of the most probable token's probability."""
    repetition_penalty: RepetitionPenalty | None = None
    """Penalty for tokens of the prompt and the output; above 1 discourages them."""
    presence_penalty: Penalty | None = None
    """Value subtracted once from the logits of tokens in the output."""
    frequency_penalty: Penalty | None = None
    """Value subtracted from a token's logit for each of its occurrences in the output."""
    logit_bias: Annotated[dict[str, Bias], Field(max_length=MAX_BIASES)] | None = None
    """Values added to the logits, by token id (as text)."""
    seed: Annotated[int, Field(ge=-(2**63), lt=2**64)] | None = None
    """Seed: the same one gives the same tokens. -1 is none; other negative ones count modulo
    2^64."""
    n: Samples | None = None
    """Number of samples of each prompt."""
    stop: Stops | None = None
    """Texts before which the output ends."""
    stop_token_ids: Annotated[TokenIds, Field(max_length=MAX_STOP_IDS)] | None = None
    """Token ids at which the output ends."""
    ignore_eos: bool | None = None
    """Continues after the end-of-text token."""
    min_tokens: Count | None = None
    """Minimum number of output tokens. Until then the end-of-text token and `stop_token_ids` are
    not generated, and `stop` has no effect."""
    bad_words: Annotated[list[Text], Field(max_length=MAX_BAD_WORDS)] | None = None
    """Texts that are never generated."""
    bad_words_ids: Annotated[list[TokenIds], Field(max_length=MAX_BAD_WORDS)] | None = None
    """Lists of token ids that are never generated."""
    include_stop_str_in_output: bool | None = None
    """Keeps the `stop` text that ended the output."""
    skip_special_tokens: bool | None = None
    """Leaves special tokens out of the output; true by default."""
    prompt_logprobs: LogprobCount | None = None
    """Returns log-probabilities of the prompt's tokens, with this many alternatives."""
    prefix_cache: bool | None = None
    """`false` reads the whole prompt and caches nothing of the request; true by default."""
    cache_salt: Annotated[Text, Field(min_length=1, max_length=MAX_SALT_CHARACTERS)] | None = None
    """Only requests with the same salt share cached prefixes; by default those of one API key
    do."""
    receipt: bool | None = None
    """Returns a receipt, from which `specrouter verify` computes the text again, and
    log-probabilities."""
    priority: Annotated[int, Field(ge=-MAX_PRIORITY, le=MAX_PRIORITY)] | None = None
    """Waiting requests with lower numbers are admitted first; one step equals ten seconds of
    waiting."""
    timeout_s: Positive | None = None
    """Seconds after which the request ends with 408, waiting included."""
    speculation: Literal["off"] | SpeculationRequest | None = None
    """`off`: the target alone; an object sets chain, depth or width; null: the router decides."""
    slo: Text | SloFields | None = None
    """Latency objectives: the name of a configured class, or values."""
    stream: bool | None = None
    """Streams the answer as server-sent events; an event may hold several tokens."""
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
        stated = {name: one for name, one in asked.items() if one is not None}
        given: dict[str, Any] = {**defaults, **stated}
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
    """Name of the target; another name gets 404."""
    prompt: Text | None = None
    """Prompt as text; give either it or `input_ids`."""
    input_ids: TokenIds | None = None
    """Prompt as token ids; give either them or `prompt`."""
    max_new_tokens: Tokens | None = None
    """Maximum number of output tokens; 128 by default."""
    logprobs: LogprobCount | None = None
    """Returns log-probabilities of the output's tokens, with this many alternatives."""
    return_drafts: bool | None = None
    """Returns for every cycle the models that proposed its tokens, and the verified draft tree."""
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
