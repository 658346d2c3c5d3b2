"""EngineConfig: limits of the engine."""

from typing import Literal

from pydantic import Field, model_validator

from modelpool.errors import ConfigError
from modelpool.kv_memory import KVMemory
from specrouter.config.policies import AdmissionPolicyName
from specrouter.config.strict import Strict
from specrouter.request.params import MAX_TREE_TOKENS

_KV_BLOCK = 32  # tokens: `statemgr.BLOCK_SLOTS`

_USUAL_TOKENS = 1024  # per request: without a length, `max_requests` such requests have room
_UNASKED_TOKENS = 2048  # per output
_ONE_REQUEST = 0.1  # share of the target's device for the KV of one longer request

# Slots of every row beyond its tokens: a tree, and what verifiers add to a draft of width 1.
TREE_SLOTS = MAX_TREE_TOKENS + 16


class EngineConfig(Strict):
    """Limits and options of the engine.

    Attributes:
        max_requests: requests that run at the same time; others wait.
        max_model_len: maximum tokens of a request, prompt and output. By default the models' own
            maximum, if there is [memory](operation.md#memory) for it, else what fits.
        prefill_chunk: maximum prompt tokens that the target reads in a cycle, besides decoding, and
            unread tokens that each drafter reads.
        kv_budget_tokens: maximum tokens of all running requests; others wait. Excludes `kv_memory`.
        kv_memory: KV memory of all models: a share of the target's device (0.3 or "30%") or an
            amount ("8GiB"). By default as much as `max_requests` requests of `max_model_len` tokens
            need; if that is not set, see [memory](operation.md#memory).
        generation_defaults: sampling parameters that a request leaves out. `neutral`: temperature 1
            for `/v1`, 0 (greedy) for `/generate` and Python, the rest off. `model`: temperature,
            `top_k`, `top_p`, `min_p` and `repetition_penalty` of the checkpoint's
            generation_config.json, greedy unless it sets `do_sample`.
        prefix_cache: keeps what requests have read, for others that begin with the same tokens, in
            unused KV memory.
        output_store_tokens: tokens of earlier outputs that `source: suffix` may quote for the same
            tenant (API key or `cache_salt`); about 0.3 KB each; 0 keeps none.
        admission: `fcfs`: first come, first served, shifted by priority; `slo`: requests with
            [attainable objectives](operation.md#objectives-under-overload) first, preempting those
            without; without objectives the same as `fcfs`.
        exact: `strict` limits trees to width 1, which can matter if `system_fingerprint` ends in
            `_varies`, and on GPUs without kernels for the model.
        preload: loads and times drafters before their first use, as far as memory allows: before
            the first request, or with `specrouter serve` [one by one](operation.md#health) in
            pauses, at the latest after 30 s. Requests wait meanwhile.
        fresh_times: measures the models' times at the start, even if there are stored ones.
        hang_timeout_s: maximum seconds of a drafter's forward; beyond it the engine fails.
        step_timeout_s: maximum seconds of a cycle, loading included; beyond it the engine fails:
            all requests end with an error, and the service exits with code 3.
    """

    max_requests: int = Field(default=32, ge=1, le=1024)
    max_model_len: int | None = Field(default=None, ge=2)
    prefill_chunk: int = Field(default=256, ge=1)
    kv_budget_tokens: int | None = Field(default=None, ge=2)
    kv_memory: float | str | None = None
    generation_defaults: Literal["neutral", "model"] = "neutral"
    prefix_cache: bool = True
    output_store_tokens: int = Field(default=131_072, ge=0)
    admission: AdmissionPolicyName = "slo"
    exact: Literal["fast", "strict"] = "fast"
    preload: bool = True
    fresh_times: bool = False
    hang_timeout_s: float = Field(default=120.0, gt=0)
    step_timeout_s: float = Field(default=600.0, gt=0)

    @model_validator(mode="after")
    def _kv_memory_is_some(self) -> "EngineConfig":
        try:
            limit = self._kv_memory
        except ValueError as error:
            raise ConfigError("kv_memory", str(error)) from error
        if limit is not None and self.kv_budget_tokens is not None:
            raise ConfigError("kv_budget_tokens", "give it or kv_memory, not both")
        return self

    @property
    def _kv_memory(self) -> KVMemory | None:
        if self.kv_memory is None:
            return None
        return KVMemory.of(self.kv_memory, _KV_BLOCK, "engine.kv_memory")

    @property
    def kv_limit(self) -> KVMemory | None:
        """Limit of the KV memory of all models together; None: `kv_tokens` applies."""
        settings = self.kv_memory, self.max_model_len, self.kv_budget_tokens
        if settings != (None, None, None):
            return self._kv_memory
        field = "engine.max_requests"
        return KVMemory(_KV_BLOCK, field, share=_ONE_REQUEST, bounds=self._kv_bounds)

    @property
    def unasked_tokens(self) -> int | None:
        """Most tokens of a chat answer without a limit of its own; None: as many as fit."""
        return _UNASKED_TOKENS if self.max_model_len is None else None

    def _kv_bounds(self, longest: int) -> tuple[int, int]:
        """Return least and most KV tokens, for a configuration without a length and a memory."""
        from statemgr import row_slots

        usual = row_slots(min(_USUAL_TOKENS, longest), TREE_SLOTS)
        return self.max_requests * usual, row_slots(longest, TREE_SLOTS)

    def max_request_tokens(self, longest: int, kv_tokens: int) -> int:
        """Return the most tokens of a request, prompt and output.

        Args:
            longest: tokens that the models can read.
            kv_tokens: tokens that the models' KV stores have memory for.
        """
        if self.max_model_len is not None:
            return min(self.max_model_len, longest)
        from statemgr import row_tokens

        return min(longest, row_tokens(kv_tokens, TREE_SLOTS))

    @property
    def most_batch_tokens(self) -> int:
        """Most prompt and decode tokens of a cycle in admission's plan."""
        return self.prefill_chunk + self.max_requests

    def row_slots(self, longest: int) -> int:
        """Return the slots of the longest request in every model's KV store, its trees included."""
        # It imports PyTorch, and errors of the configuration should not wait for that.
        from statemgr import row_slots

        return row_slots(min(self.max_model_len or longest, longest), TREE_SLOTS)

    @property
    def row_states(self) -> int:
        """States kept by a model with recurrent layers: of rows, on their way, and of prefixes."""
        from statemgr import KEPT_STATES

        return self.max_requests * (1 + 2 * KEPT_STATES)

    def kv_tokens(self, longest: int) -> int:
        """Return the tokens that each model needs KV memory for, without `kv_memory`.

        These are all slots of `max_requests` of the longest requests, or `kv_budget_tokens` if
        less.
        """
        from statemgr import row_slots

        whole, budget = self.max_requests * self.row_slots(longest), self.kv_budget_tokens
        return whole if budget is None else min(whole, row_slots(budget, TREE_SLOTS))
