"""The configuration: one YAML file per scenario, one tree of strict models."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, model_validator

from modelpool.config import PoolConfig, validate_config
from modelpool.errors import ConfigError
from specrouter.params import MAX_DEPTH, MAX_TREE_TOKENS, MAX_WIDTH

Policy = Literal["adaptive", "paper", "static", "target-only"]


class _Strict(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class SchedulerConfig(_Strict):
    """`adaptive`: measured times and acceptances; `paper`: SpecRouter's formula and hard rejection;
    `static`: always `chain`; `target-only`: no speculation."""

    policy: Policy = "adaptive"
    depth: int = Field(default=4, ge=1, le=MAX_DEPTH)
    width: int = Field(default=1, ge=1, le=MAX_WIDTH)
    chain: tuple[str, ...] | None = None

    @model_validator(mode="after")
    def _static_has_a_chain(self) -> "SchedulerConfig":
        if (self.policy == "static") != (self.chain is not None):
            raise ValueError("a chain goes with policy static, and policy static needs one")
        return self

    @model_validator(mode="after")
    def _tree_is_not_too_large(self) -> "SchedulerConfig":
        if self.depth * self.width > MAX_TREE_TOKENS:
            raise ConfigError("width", f"depth times width must be at most {MAX_TREE_TOKENS}")
        return self


class EngineConfig(_Strict):
    """Limits of what runs together.

    Attributes:
        max_requests: rows, that is, requests that run at the same time; others wait.
        max_model_len: the most tokens of a request, prompt and output.
        prefill_chunk: prompt tokens that the target reads beside the decoding requests of a cycle.
        kv_budget_tokens: the most tokens that all running requests may reserve together.
        verification: `shared-noise`: every model chooses with the same noise, so a seed gives one
            text whatever drafts for it; `rejection`: Leviathan's rule, trees of width 1, exact in
            distribution, but the text of a seed depends on the chains.
        exact: `strict` keeps trees at width 1, so that the target's cache and its forwards' shapes
            are as they would be without branches; it matters in bfloat16 and float16 only.
        hang_timeout_s: after so many seconds in one forward, a model other than the target is given
            up; its cycle goes on without it.
    """

    max_requests: int = Field(default=32, ge=1, le=1024)
    max_model_len: int = Field(default=1024, ge=2)
    prefill_chunk: int = Field(default=256, ge=1)
    kv_budget_tokens: int | None = Field(default=None, ge=2)
    verification: Literal["shared-noise", "rejection"] = "shared-noise"
    exact: Literal["fast", "strict"] = "fast"
    hang_timeout_s: float = Field(default=30.0, gt=0)


class ServerConfig(_Strict):
    host: str = "127.0.0.1"
    port: int = Field(default=8000, ge=0, le=65535)


class RouterConfig(_Strict):
    pool: PoolConfig
    scheduler: SchedulerConfig = SchedulerConfig()
    engine: EngineConfig = EngineConfig()
    server: ServerConfig = ServerConfig()

    @model_validator(mode="after")
    def _chain_is_of_the_pool(self) -> "RouterConfig":
        chain = self.scheduler.chain
        if chain is None:
            return self
        names = [model.name for model in self.pool.models]
        unknown = [name for name in chain if name not in names]
        if unknown:
            raise ConfigError("scheduler.chain", f"{unknown[0]!r} is not in the pool")
        if not chain or chain[-1] != self.pool.target:
            raise ConfigError("scheduler.chain", f"must end in the target {self.pool.target!r}")
        if len(set(chain)) != len(chain):
            raise ConfigError("scheduler.chain", "names a model twice")
        weightless = [model.name for model in self.pool.models if model.is_weightless]
        for name in set(chain[1:]).intersection(weightless):
            reason = f"{name!r} has no model: it can only stand first"
            raise ConfigError("scheduler.chain", reason)
        return self

    @classmethod
    def load(cls, source: "str | Path | Mapping[str, Any] | RouterConfig") -> "RouterConfig":
        """From a YAML file, a mapping or an existing configuration. Raises `ConfigError`."""
        if isinstance(source, RouterConfig):
            return source
        if isinstance(source, Mapping):
            return validate_config(cls, source)
        try:
            data = yaml.safe_load(Path(source).read_text(encoding="utf-8"))
        except OSError as error:
            raise ConfigError("config", f"cannot read {source}: {error.strerror}") from error
        except UnicodeDecodeError as error:
            raise ConfigError("config", f"{source} is not UTF-8 text: {error}") from error
        except yaml.YAMLError as error:
            raise ConfigError("config", f"{source} is not YAML: {error}") from error
        if not isinstance(data, dict):
            raise ConfigError("config", f"{source} holds no mapping at its top level")
        return validate_config(cls, data)
