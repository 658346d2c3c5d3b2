"""The configuration: one YAML file per scenario, one tree of strict models."""

import logging
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from modelpool.config import PoolConfig, validate_config
from modelpool.errors import ConfigError
from specrouter.request.objective import BY_VALUE, NO_OBJECTIVE, SLO
from specrouter.request.params import (
    MAX_DEPTH,
    MAX_TREE_TOKENS,
    MAX_WIDTH,
    RequestError,
)
from specrouter.yaml_file import read_mapping
from statemgr import row_slots

logger = logging.getLogger(__name__)

# Of every row, beyond its reserved tokens: a tree, and what verifiers add to a draft of width 1.
TREE_SLOTS = MAX_TREE_TOKENS + 16
_WITHOUT_EFFECT = frozenset(
    {"inner_rounds", "groups"}
)  # keys of the scheduler, of earlier versions
_API_KEY = re.compile(r"[!-~]+")
# The host is a name, an IPv4 or, in brackets, an IPv6 address.
_ORIGIN = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://([^\s/?#@:\[\]]+|\[[0-9A-Fa-f:.]+\])(:\d{1,5})?")

Policy = Literal["adaptive", "paper", "static", "ssd-smallest", "target-only"]
Selection = Literal["costmodel", "slo", "global-greedy", "equal-greedy", "whole"]


class _Strict(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class SchedulerConfig(_Strict):
    """How chains and trees are chosen.

    Attributes:
        policy: `adaptive`: measured times and acceptances decide; `paper`: SpecRouter's formula and
            hard rejection; `static`: always `chain`, such as the best one that
            `specrouter bench chains` finds; `ssd-smallest`: the smallest drafter and the target;
            `target-only`: no speculation.
        depth: levels of the drafted token trees. Left out, `adaptive` chooses it, and the other
            policies take 4.
        width: branches on each level; times the depth at most 64. Left out, `adaptive` chooses it,
            and the other policies take 1.
        nodes: of a request's tree, in the mean, that the target verifies: the most probable ones.
            Left out, `adaptive` chooses it, and the other policies verify whole trees.
        chain: of `static`: names, weakest first, the target last.
    """

    policy: Policy = "adaptive"
    depth: int | None = Field(default=None, ge=1, le=MAX_DEPTH)
    width: int | None = Field(default=None, ge=1, le=MAX_WIDTH)
    nodes: int | None = Field(default=None, ge=1, le=MAX_TREE_TOKENS)
    chain: tuple[str, ...] | None = None

    @model_validator(mode="before")
    @classmethod
    def _reads_old_keys(cls, given: Any) -> Any:
        if not isinstance(given, Mapping):
            return given
        for name in _WITHOUT_EFFECT & set(given):
            if given[name] is not None:
                logger.warning("scheduler.%s has no effect any more", name)
        kept = {name: value for name, value in given.items() if name not in _WITHOUT_EFFECT}
        if kept.get("policy") == "ssd-tuned":  # its chain was tuned offline
            kept["policy"] = "static"
        return kept

    @model_validator(mode="after")
    def _fixed_policies_have_a_chain(self) -> "SchedulerConfig":
        if (self.policy == "static") != (self.chain is not None):
            raise ValueError("a chain goes with the policy static, which needs one")
        return self

    @model_validator(mode="after")
    def _tree_is_not_too_large(self) -> "SchedulerConfig":
        if (self.depth or 1) * (self.width or 1) > MAX_TREE_TOKENS:
            raise ConfigError("width", f"depth times width must be at most {MAX_TREE_TOKENS}")
        return self


class TreesConfig(_Strict):
    """How large the trees of a cycle are, and which of their nodes the target verifies.

    Attributes:
        shape: depth and width of the drafts. `costmodel`: those that promise most, cycle by cycle,
            with the prompts that are read in it and the objectives of its requests; `adaserve` and
            `adaserve-v1`: by the number of requests (AdaServe, Equations 8 and 9, and their earlier
            form); `fixed`: as the scheduler's policy says; `static`: SpecInfer's tree.
        selection: `costmodel`: maximises the expected rate of tokens that arrive in time; `slo`:
            AdaServe's Algorithm 2 under a budget; `global-greedy`: the same without objectives;
            `equal-greedy`: the same share for each request; `whole`: all nodes. Left out, adaptive
            routing takes `costmodel`, the other policies verify whole trees, or their `nodes`.
        budget_tokens: tokens that the target reads in a cycle, roots and prompts included, for
            `slo`, `global-greedy` and `equal-greedy`. Left out, as many as bring most tokens per
            second by its measured times and the acceptances so far.
        n_max_share: nodes that a request may get towards its objective, times its equal share.
        latency_margin: on the foreseen time of a cycle, where objectives are weighed.
        root_credit: accepted tokens that a tree's root stands for.
        order: who is served first when a budget does not serve all, `slo` only.
        max_depth, min_depth, max_width: bounds of the Equations 8 and 9.
        drafter_tokens: B2 of Equation 9, what a drafter reads in a step; left out, the budget.
        c1, c2: constants of the Equations 8 and 9.
    """

    shape: Literal["costmodel", "adaserve", "adaserve-v1", "fixed", "static"] = "costmodel"
    selection: Selection | None = None
    budget_tokens: int | None = Field(default=None, ge=1)
    n_max_share: float = Field(default=1.2, gt=0, allow_inf_nan=False)
    latency_margin: float = Field(default=1.05, ge=1, allow_inf_nan=False)
    root_credit: float = Field(default=1.0, ge=0, le=1)
    order: Literal["neediest", "easiest"] = "neediest"
    max_depth: int = Field(default=8, ge=1, le=MAX_DEPTH)
    min_depth: int = Field(default=1, ge=1, le=MAX_DEPTH)
    max_width: int = Field(default=3, ge=1, le=MAX_WIDTH)
    drafter_tokens: int | None = Field(default=None, ge=1)
    c1: int = Field(default=0, ge=0)
    c2: int = Field(default=0, ge=0)

    @model_validator(mode="after")
    def _depths_are_in_order(self) -> "TreesConfig":
        if self.min_depth > self.max_depth:
            raise ConfigError("min_depth", f"must be at most max_depth, which is {self.max_depth}")
        if self.max_depth * self.max_width > MAX_TREE_TOKENS:
            raise ConfigError("max_width", f"times max_depth must be at most {MAX_TREE_TOKENS}")
        return self


class EngineConfig(_Strict):
    """Limits of what runs together.

    Attributes:
        max_requests: rows, that is, requests that run at the same time; others wait.
        max_model_len: the most tokens of a request, prompt and output.
        prefill_chunk: prompt tokens that the target reads beside the decoding requests of a cycle,
            and that each drafter reads of texts it has not seen.
        kv_budget_tokens: the most tokens that all running requests may reserve together; others
            wait. It saves no memory, which each loaded model takes for all rows at once.
        verification: `shared-noise`: every model chooses with the same noise, so a seed gives one
            text whatever drafts for it; `rejection`: Leviathan's rule, trees of width 1, exact in
            distribution, but the text of a seed depends on the chains.
        exact: `strict` keeps trees at width 1, so that the target's cache and its forwards' shapes
            are as they would be without branches; it matters in bfloat16 and float16 only.
        preload: loads and times the drafters that the policy may choose before the first request is
            taken, while there is room for them; otherwise each is when it is first used, while the
            requests that run wait for it.
        hang_timeout_s: after so many seconds in one forward, a model other than the target is given
            up; its cycle goes on without it.
        step_timeout_s: after so many seconds in one cycle, models that are loaded in it included,
            the engine counts as stuck: every request ends with an error, and the service stops.
    """

    max_requests: int = Field(default=32, ge=1, le=1024)
    max_model_len: int = Field(default=1024, ge=2)
    prefill_chunk: int = Field(default=256, ge=1)
    kv_budget_tokens: int | None = Field(default=None, ge=2)
    verification: Literal["shared-noise", "rejection"] = "shared-noise"
    exact: Literal["fast", "strict"] = "fast"
    preload: bool = True
    hang_timeout_s: float = Field(default=30.0, gt=0)
    step_timeout_s: float = Field(default=600.0, gt=0)

    def max_request_tokens(self, longest: int) -> int:
        """Of a request, prompt and output, where models can be used at `longest` tokens."""
        return min(self.max_model_len, longest)

    def row_slots(self, longest: int) -> int:
        """Slots that each request has in every model's KV store, its trees included."""
        return row_slots(self.max_request_tokens(longest), TREE_SLOTS)

    def kv_tokens(self, longest: int) -> int:
        """That each model's place must have KV memory for: all slots of all rows."""
        return self.max_requests * self.row_slots(longest)


class ServerConfig(_Strict):
    """The HTTP service.

    Attributes:
        host: address to listen on; 0.0.0.0 is every interface.
        port: 0 picks a free one.
        max_waiting: requests that may wait for a row; beyond it the answer is 503.
        max_choices: texts that one HTTP request may ask for: prompts times samples of each.
        max_body_bytes: of an HTTP request.
        request_timeout_s: after which a request ends, waiting or running.
        drain_s: how long running requests may go on after the signal to stop.
        api_keys: any of them opens the service, as `Authorization: Bearer KEY`; so does the one in
            the environment, SPECROUTER_API_KEY. Without any, it is open to all.
        cors_origins: of web pages that may call the service; "*" is any.
        log_format: of what is logged to stderr.
        chat_template: a file with a Jinja template, instead of the tokenizer's.
    """

    host: str = "127.0.0.1"
    port: int = Field(default=8000, ge=0, le=65535)
    max_waiting: int = Field(default=256, ge=1)
    max_choices: int = Field(default=128, ge=1)
    max_body_bytes: int = Field(default=4 * 2**20, ge=1024)
    request_timeout_s: float = Field(default=600.0, gt=0, allow_inf_nan=False)
    drain_s: float = Field(default=30.0, ge=0, allow_inf_nan=False)
    api_keys: tuple[str, ...] = Field(default=(), repr=False)
    cors_origins: tuple[str, ...] = ()
    log_format: Literal["text", "json"] = "text"
    chat_template: Path | None = None

    @field_validator("api_keys")
    @classmethod
    def _keys_can_be_sent(cls, keys: tuple[str, ...]) -> tuple[str, ...]:
        for number, key in enumerate(keys, start=1):
            if not is_api_key(key):  # its text is a secret, also in an error
                raise ConfigError("", f"key {number} must be printable ASCII without spaces")
        return keys

    @field_validator("chat_template")
    @classmethod
    def _of_the_user(cls, file: Path | None) -> Path | None:
        return file and file.expanduser()

    @field_validator("cors_origins")
    @classmethod
    def _origins_are_what_browsers_send(cls, origins: tuple[str, ...]) -> tuple[str, ...]:
        for origin in origins:
            if origin != "*" and not _ORIGIN.fullmatch(origin):
                raise ConfigError("", f'{origin!r} is neither "*" nor scheme://host[:port]')
        return origins


class SloConfig(_Strict):
    """A class of objectives, by the name that requests ask for. At least one must be given.

    Attributes:
        tpot_ms: mean time of an output token after the first, in milliseconds; above 0, like all.
        ttft_ms: from submission to the first token, in milliseconds.
        tpot_ratio: `tpot_ms` as so many times what a token takes when the target serves one request
            alone. Not together with `tpot_ms`.
        e2e_ms: end-to-end latency, from submission to the last token, in milliseconds.
    """

    tpot_ms: float | None = Field(default=None, strict=True)
    ttft_ms: float | None = Field(default=None, strict=True)
    tpot_ratio: float | None = Field(default=None, strict=True)
    e2e_ms: float | None = Field(default=None, strict=True)

    @model_validator(mode="after")
    def _is_an_slo(self) -> "SloConfig":
        try:
            self.slo()
        except RequestError as error:
            raise ConfigError(error.field.removeprefix("slo").lstrip("."), error.reason) from None
        return self

    def slo(self) -> SLO:
        return SLO(self.tpot_ms, self.ttft_ms, self.tpot_ratio, e2e_ms=self.e2e_ms)


class RouterConfig(_Strict):
    """A scenario.

    Attributes:
        pool: the models.
        scheduler: how chains are chosen.
        trees: how large drafts are, and what of them is verified.
        engine: limits of what runs together.
        server: the HTTP service.
        slo_classes: names for objectives, for requests to ask for.
    """

    pool: PoolConfig
    scheduler: SchedulerConfig = SchedulerConfig()
    trees: TreesConfig = TreesConfig()
    engine: EngineConfig = EngineConfig()
    server: ServerConfig = ServerConfig()
    slo_classes: dict[str, SloConfig] = Field(default_factory=dict)  # by the name to ask for

    @field_validator("slo_classes")
    @classmethod
    def _classes_have_names(cls, classes: dict[str, SloConfig]) -> dict[str, SloConfig]:
        for name in classes:
            if not name.strip():
                raise ConfigError("", "a class must have a name")
            if name in (BY_VALUE, NO_OBJECTIVE):
                raise ConfigError(name, "stands for requests without a class; choose another name")
        return classes

    @model_validator(mode="after")
    def _chain_is_of_the_pool(self) -> "RouterConfig":
        check_chain(self)
        return self

    @classmethod
    def load(cls, source: "str | Path | Mapping[str, Any] | RouterConfig") -> "RouterConfig":
        """From a YAML file, a mapping or an existing configuration. Raises `ConfigError`."""
        if isinstance(source, RouterConfig):
            return source
        if isinstance(source, Mapping):
            return validate_config(cls, source)
        return validate_config(cls, read_mapping(source))


def is_api_key(text: str) -> bool:
    """Whether a client can send it in a header."""
    return _API_KEY.fullmatch(text) is not None


def check_chain(config: RouterConfig) -> None:
    """Raises `ConfigError` unless the scheduler's chain, if there is one, is one of the pool."""
    chain = config.scheduler.chain
    if chain is None:
        return
    names = [model.name for model in config.pool.models]
    unknown = [name for name in chain if name not in names]
    if unknown:
        raise ConfigError("scheduler.chain", f"{unknown[0]!r} is not in the pool")
    if not chain or chain[-1] != config.pool.target:
        raise ConfigError("scheduler.chain", f"must end in the target {config.pool.target!r}")
    if len(set(chain)) != len(chain):
        raise ConfigError("scheduler.chain", "names a model twice")
    weightless = [model.name for model in config.pool.models if model.is_weightless]
    for name in set(chain[1:]).intersection(weightless):
        reason = f"{name!r} has no model: it can only stand first"
        raise ConfigError("scheduler.chain", reason)
