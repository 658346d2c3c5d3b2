"""The answers of the service, as the API's schema describes them.

Contract: answers are made as plain dicts; these classes only describe them, and a test holds the
two together. The text below a field is its description in the schema.
"""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict


class Described(BaseModel):
    model_config = ConfigDict(use_attribute_docstrings=True)


class Loose(Described):
    """More fields may come with what is asked for."""

    model_config = ConfigDict(extra="allow")


class FeasibleObjective(Described):
    ttft_ms: float | None
    """Time to the first token, in milliseconds; null: not known."""
    tpot_ms: float | None
    """Mean time of an output token after the first, in milliseconds; null: not known."""


class ErrorDetails(Described):
    message: str
    """What is wrong, in words."""
    type: str
    """`invalid_request_error` for 4xx, `server_error` for 5xx."""
    param: str | None
    """The field that is wrong, as a path such as `messages[0].content`."""
    code: str | None
    """A word for programs, such as `context_length_exceeded`."""
    feasible: FeasibleObjective | None = None
    """With `slo_unattainable`: the earliest objective that could have been attained."""


class ErrorAnswer(Described):
    error: ErrorDetails
    """Why there is no other answer."""


class OpenAIObject(Loose):
    id: str
    """Of this answer; it contains the request's id."""
    object: str
    """What the answer is, such as `chat.completion`."""
    created: int
    """In seconds since 1970."""
    model: str
    """The target."""
    system_fingerprint: str
    """Changes where the same seed may give another text: another target, dtype or version."""
    choices: list[dict[str, Any]]
    """The outputs, with `index`, the text or the message, and `finish_reason`."""
    usage: dict[str, Any]
    """Tokens of the prompt and the output, and of the latter those that were drafted."""


class GenerateAnswerObject(Loose):
    """With `n` above 1, texts are in `choices`."""

    seed: int
    """The same request with this seed gives the same tokens."""
    text: str | None = None
    """The output."""
    token_ids: list[int] | None = None
    """Its tokens."""
    finish_reason: str | None = None
    """`eos`, `stop` or `length`."""
    metrics: dict[str, Any] | None = None
    """Times in milliseconds, acceptance length, and the cycles of each chain."""
    drafts: list[dict[str, Any]] | None = None
    """With `return_drafts`: by cycle, who proposed its tokens and what was drafted; in a stream
    `draft`, of the event's cycle."""
    choices: list[dict[str, Any]] | None = None
    """The samples, by `index`, each with the fields above but `seed`."""


class ModelObject(Described):
    id: str
    """What requests may send as `model`."""
    object: str
    """`model`."""
    created: int
    """When the service began, in seconds since 1970."""
    owned_by: str
    """`specrouter`."""
    root: str
    """The same as `id`."""
    max_model_len: int
    """Tokens of a request, prompt and output, at most."""


class ModelList(Described):
    object: str
    """`list`."""
    data: list[ModelObject]
    """The target alone."""


class TokenizeAnswer(Described):
    count: int
    """Number of tokens."""
    max_model_len: int
    """Tokens of a request, prompt and output, at most."""
    tokens: list[int]
    """Token ids."""
    token_strs: list[str] | None
    """The tokens' texts, where they were asked for."""


class DetokenizeAnswer(Described):
    prompt: str
    """The text."""


class VersionAnswer(Described):
    version: str
    """Of SpecRouter."""


class HealthAnswer(Loose):
    status: str
    """`ok`, or `degraded`: fewer replicas serve than there should be."""
    replicas: dict[str, str] | None = None
    """What each replica is doing, where there are any."""


class RestartAnswer(Described):
    status: str
    """`restarting`; `/health` says which replicas are ready."""


class DecisionsAnswer(Described):
    decisions: list[dict[str, Any]]
    """Oldest first; each with chain, tree, reason, prediction, and those of the alternatives."""
    admissions: list[dict[str, Any]]
    """Oldest first; what was decided about which request's objective, and why."""
    prefixes: list[dict[str, Any]]
    """Oldest first; how much of its prompt each of the last requests found cached."""
    routings: list[dict[str, Any]]
    """Oldest first; to which replica a request went, with the terms of each and the reason."""


class StatisticsAnswer(Loose):
    cycles: int
    """Decoding cycles."""
    cycle_ms: float
    """Their time."""
    model_ms: dict[str, float]
    """Of it, in each model's forward passes."""
    logits_ms: float
    """Of it, in the work on logits and drafts."""
    control_ms: float
    """Of it, in the control plane."""
    forwards: dict[str, int]
    """Forward passes of each model."""
    committed_tokens: int
    """Output tokens of all requests."""
    switches: int
    """Changes of chain or tree."""


class CalibrationAnswer(Described):
    calibration: list[dict[str, Any]]
    """By chain of proposers and verifier: how far predicted acceptance is from what was seen."""


class SloAnswer(Described):
    duration_s: float
    """From the first submission to the latest end."""
    total: dict[str, Any]
    """Of all requests: how many attained their objectives, goodput, percentiles."""
    classes: dict[str, dict[str, Any]]
    """The same by class; `default` are objectives by value, `none` requests without one."""
