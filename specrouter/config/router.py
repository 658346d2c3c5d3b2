"""RouterConfig: a scenario, as a tree of strict sections."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import Field, PrivateAttr, field_validator, model_validator

from modelpool.config import PoolConfig, validate_config
from modelpool.errors import ConfigError
from specrouter.config.cluster import ClusterConfig, ReplicaConfig
from specrouter.config.engine import EngineConfig
from specrouter.config.old_spellings import in_new_spelling
from specrouter.config.scheduler import SchedulerConfig, TreesConfig
from specrouter.config.server import ServerConfig
from specrouter.config.slo_class import SloConfig
from specrouter.config.strict import Strict
from specrouter.config.yaml_file import read_mapping
from specrouter.request.objective import BY_VALUE, NO_OBJECTIVE
from specrouter.request.params import RequestError, Speculation
from specrouter.scenarios import find_scenario

# Keys of `engine` that texts or routing depend on.
_OF_ALL_REPLICAS = ("exact", "generation_defaults", "prefix_cache")


class RouterConfig(Strict):
    """The sections of a scenario.

    Attributes:
        pool: the models.
        scheduler: choice of chains and draft trees.
        trees: choice of the draft tokens to verify.
        engine: limits and options of the engine.
        server: the HTTP service.
        slo_classes: named objectives for requests.
        cluster: replicas in separate processes; without it, one engine runs in this process.
    """

    pool: PoolConfig
    scheduler: SchedulerConfig = Field(default_factory=SchedulerConfig)
    trees: TreesConfig = Field(default_factory=TreesConfig)
    engine: EngineConfig = Field(default_factory=EngineConfig)
    server: ServerConfig = ServerConfig()
    slo_classes: dict[str, SloConfig] = Field(default_factory=dict)  # by name

    cluster: ClusterConfig | None = None

    _warnings: tuple[str, ...] = PrivateAttr(())

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
    def _replicas_can_be_configured(self) -> "RouterConfig":
        self.replicas()
        return self

    @model_validator(mode="after")
    def _chain_is_of_the_pool(self) -> "RouterConfig":
        check_chain(self)
        return self

    @classmethod
    def load(cls, source: "str | Path | Mapping[str, Any] | RouterConfig") -> "RouterConfig":
        """Load a YAML file, a bundled scenario by name, a mapping or a configuration.

        A file of that name takes precedence over a scenario. Raises `ConfigError`.
        """
        if isinstance(source, RouterConfig):
            return source
        given = source if isinstance(source, Mapping) else read_mapping(find_scenario(source))
        settings, warnings = in_new_spelling(given)
        try:
            config = validate_config(cls, settings)
        except ConfigError as error:  # its cause may be an old spelling
            raise ConfigError(error.field, "; ".join((error.reason, *warnings))) from error
        config._warnings = warnings
        return config

    def replicas(self) -> "dict[str, RouterConfig]":
        """Return the configuration of each replica by name. Raises `ConfigError`."""
        found: dict[str, RouterConfig] = {}
        for field, replica in self.cluster.processes if self.cluster else ():
            config = self._of_replica(f"cluster.{field}", replica)
            found |= dict.fromkeys(replica.names, config)
        return found

    def _of_replica(self, field: str, replica: ReplicaConfig) -> "RouterConfig":
        engine = {**self.engine.model_dump(), **replica.engine}
        checked = validate_config(EngineConfig, engine, f"{field}.engine")
        for key in _OF_ALL_REPLICAS:
            if getattr(checked, key) != getattr(self.engine, key):
                reason = f"must be that of all replicas: set engine.{key}"
                raise ConfigError(f"{field}.engine.{key}", reason)
        pool = self.pool
        if replica.device is not None:
            placed = [
                model.model_dump(exclude_unset=True)
                | ({"device": replica.device} if model.is_placed else {})
                for model in pool.models
            ]
            settings = {**pool.model_dump(exclude_unset=True), "models": placed}
            pool = validate_config(PoolConfig, settings, field)
        return self.model_copy(update={"engine": checked, "pool": pool, "cluster": None})

    def with_fresh_times(self) -> "RouterConfig":
        """Return a copy of the configuration that times the models anew."""
        engine = self.engine.model_copy(update={"fresh_times": True})
        return self.model_copy(update={"engine": engine})

    @property
    def warnings(self) -> tuple[str, ...]:
        """A line for each old spelling that was read: the key and its replacement."""
        return self._warnings


def check_chain(config: RouterConfig) -> None:
    """Raise `ConfigError` if the scheduler has a chain that is not one of the pool."""
    chain = config.scheduler.chain
    if chain is None:
        return
    names = tuple(model.name for model in config.pool.models)
    draft_only = [model.name for model in config.pool.models if not model.has_model]
    try:
        Speculation(chain=chain).check_members(names, config.pool.target, draft_only)
    except RequestError as error:
        raise ConfigError("scheduler.chain", error.reason) from error
