"""The configuration: one YAML file per scenario, one tree of strict models."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, model_validator

from modelpool.config import PoolConfig, validate_config
from modelpool.errors import ConfigError
from specrouter.params import MAX_DEPTH, MAX_INNER_ROUNDS, MAX_TREE_TOKENS, MAX_WIDTH

Policy = Literal["adaptive", "paper", "static", "ssd-smallest", "ssd-tuned", "target-only"]


class _Strict(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class SchedulerConfig(_Strict):
    """How chains and trees are chosen.

    Attributes:
        policy: `adaptive`: measured times and acceptances decide; `paper`: SpecRouter's formula and
            hard rejection; `static`: always `chain`; `ssd-smallest`: the smallest drafter and the
            target; `ssd-tuned`: a `chain` of two models with the depth and width that were found to
            be the best offline (`specrouter bench chains` finds them); `target-only`.
        depth, width: of the drafted token trees. Left out, `adaptive` chooses them, and the other
            policies take 4 and 1.
        nodes: of a request's tree, in the mean, that the target verifies: the most probable ones.
            Left out, `adaptive` chooses it, and the other policies verify whole trees.
        inner_rounds: how often the first intermediate of a chain judges a draft before the next
            model sees the result. Left out, `adaptive` chooses it, and the others take 1.
        groups: `requests`: requests that decode together may use different drafters; their trees
            meet in one pass of the target. `one`: one chain for all.
        chain: of `static` and `ssd-tuned`.
    """

    policy: Policy = "adaptive"
    depth: int | None = Field(default=None, ge=1, le=MAX_DEPTH)
    width: int | None = Field(default=None, ge=1, le=MAX_WIDTH)
    nodes: int | None = Field(default=None, ge=1, le=MAX_TREE_TOKENS)
    inner_rounds: int | None = Field(default=None, ge=1, le=MAX_INNER_ROUNDS)
    groups: Literal["one", "requests"] = "one"
    chain: tuple[str, ...] | None = None

    @model_validator(mode="after")
    def _fixed_policies_have_a_chain(self) -> "SchedulerConfig":
        if (self.policy in ("static", "ssd-tuned")) != (self.chain is not None):
            raise ValueError(
                "a chain goes with the policies static and ssd-tuned, and each needs one"
            )
        if self.policy == "ssd-tuned":
            if self.chain is not None and len(self.chain) != 2:
                raise ConfigError("chain", "of ssd-tuned must be a drafter and the target")
            for name in ("depth", "width"):
                if getattr(self, name) is None:
                    raise ConfigError(name, "is what ssd-tuned has tuned: it must be given")
        return self

    @model_validator(mode="after")
    def _tree_is_not_too_large(self) -> "SchedulerConfig":
        if (self.depth or 1) * (self.width or 1) > MAX_TREE_TOKENS:
            raise ConfigError("width", f"depth times width must be at most {MAX_TREE_TOKENS}")
        if (self.depth or 1) * (self.inner_rounds or 1) > MAX_DEPTH:
            raise ConfigError("inner_rounds", f"times the depth must be at most {MAX_DEPTH}")
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
        check_chain(self)
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
