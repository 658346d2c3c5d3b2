"""EngineConfig: limits of what runs together."""

from typing import Literal

from pydantic import Field, field_validator, model_validator

from modelpool.errors import ConfigError
from modelpool.kv_memory import KVMemory
from specrouter.config.policies import ADMISSION_POLICIES
from specrouter.config.strict import Strict
from specrouter.request.params import MAX_TREE_TOKENS

_KV_BLOCK = 128  # tokens: `statemgr.row_groups.KV_QUANTUM`

# Of every row, beyond its reserved tokens: a tree, and what verifiers add to a draft of width 1.
TREE_SLOTS = MAX_TREE_TOKENS + 16


class EngineConfig(Strict):
    """Limits of what runs together.

    Attributes:
        max_requests: rows, that is, requests that run at the same time; others wait.
        max_model_len: the most tokens of a request, prompt and output.
        prefill_chunk: prompt tokens that the target reads beside the decoding requests of a cycle,
            and that each drafter reads of texts it has not seen.
        kv_budget_tokens: the most tokens that all running requests may reserve together; others
            wait. It saves no memory, and is not given beside `kv_memory`.
        kv_memory: what the keys and values of all models together take: a share of all memory of
            the target's device (0.3 or "30%"), or an amount ("8GiB"). Requests reserve what they
            may need of it, in blocks of 128 tokens, and wait while there is none; what is left
            keeps prefixes. By default there is room for `max_requests` requests of
            `max_model_len` tokens.
        prefix_cache: what requests have read is kept for others that begin with the same tokens,
            while nobody else needs its memory.
        output_store_tokens: of earlier outputs, which a drafter with `source: suffix` may quote for
            requests of the same tenant only (API key or `cache_salt`); the oldest make room. A
            token takes about 0.3 KB. 0 keeps none.
        output_store_file: where they are written when the service ends, and read from when it
            starts, by tenant, readable by the service's user only; by default they end with it. It
            needs a model of the pool with `source: suffix`, and no `cluster`.
        admission: `fcfs`: first come, first served, moved by priority; `slo`: the same where no
            request has an objective; else requests whose objectives are attainable come first, in
            time for all whom it admits, and take rows back from those without, which go on later
            with the same text; or one's own, as `package.module:NAME`.
        verification: `shared-noise`: every model chooses with the same noise, so a seed gives one
            text whatever drafts for it; `rejection`: Leviathan's rule, trees of width 1, exact in
            distribution, but the text of a seed depends on the chains.
        exact: `strict` keeps trees at width 1, so that the target's cache and its forwards' shapes
            are as they would be without branches; it matters in bfloat16 and float16 only, and is
            always so for a target in float32 whose weights are in int8.
        preload: loads and times the drafters that the policy may choose before the first request is
            taken, while there is room for them; otherwise each is when it is first used, while the
            requests that run wait for it.
        fresh_times: measures the models' times at the start, instead of those that an earlier start
            has kept: for a machine that was busy then.
        overlap_drafting: where all models of a chain but the target are on other devices, half of
            the requests draft while the target verifies the other half. A cycle then has two passes
            of the target instead of one, so it pays where a pass over half the requests takes
            clearly less time; texts are the same.
        hang_timeout_s: after so many seconds in one forward, a model other than the target is given
            up; its cycle goes on without it.
        step_timeout_s: after so many seconds in one cycle, models that are loaded in it included,
            the engine counts as stuck: every request ends with an error, and the service stops.
    """

    max_requests: int = Field(default=32, ge=1, le=1024)
    max_model_len: int = Field(default=1024, ge=2)
    prefill_chunk: int = Field(default=256, ge=1)
    kv_budget_tokens: int | None = Field(default=None, ge=2)
    kv_memory: float | str | None = None
    prefix_cache: bool = True
    output_store_tokens: int = Field(default=131_072, ge=0)
    output_store_file: str | None = None
    admission: str = "slo"
    verification: Literal["shared-noise", "rejection"] = "shared-noise"
    exact: Literal["fast", "strict"] = "fast"
    preload: bool = True
    fresh_times: bool = False
    overlap_drafting: bool = False
    hang_timeout_s: float = Field(default=30.0, gt=0)
    step_timeout_s: float = Field(default=600.0, gt=0)

    @field_validator("admission")
    @classmethod
    def _admission_is_registered(cls, admission: str) -> str:
        ADMISSION_POLICIES.find(admission)
        return admission

    @model_validator(mode="after")
    def _kv_memory_is_some(self) -> "EngineConfig":
        if self.kv_memory is None:
            return self
        try:
            KVMemory.of(self.kv_memory, _KV_BLOCK, "engine.kv_memory")
        except ValueError as error:
            raise ConfigError("kv_memory", str(error)) from error
        if self.kv_budget_tokens is not None:
            raise ConfigError("kv_budget_tokens", "give it or kv_memory, not both")
        return self

    @property
    def kv_limit(self) -> KVMemory | None:
        """`kv_memory`, read."""
        if self.kv_memory is None:
            return None
        return KVMemory.of(self.kv_memory, _KV_BLOCK, "engine.kv_memory")

    def max_request_tokens(self, longest: int) -> int:
        """Of a request, prompt and output, where models can be used at `longest` tokens."""
        return min(self.max_model_len, longest)

    @property
    def most_batch_tokens(self) -> int:
        """Of prompts and of decoding requests, that admission plans a cycle with."""
        return self.prefill_chunk + self.max_requests

    def row_slots(self, longest: int) -> int:
        """Slots that the longest request has in every model's KV store, its trees included."""
        # Imports PyTorch, which an error of the configuration should not wait for.
        from statemgr import row_slots

        return row_slots(self.max_request_tokens(longest), TREE_SLOTS)

    def kv_tokens(self, longest: int) -> int:
        """That each model's place must have KV memory for without `kv_memory`: all slots of as
        many of the longest requests as may run."""
        return self.max_requests * self.row_slots(longest)
