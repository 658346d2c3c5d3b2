"""The configuration: one YAML file per scenario, as a tree of strict models."""

from specrouter.config.cluster import ClusterConfig, ResumeConfig, RoutingConfig
from specrouter.config.engine import TREE_SLOTS, EngineConfig
from specrouter.config.router import RouterConfig, check_chain
from specrouter.config.scheduler import SchedulerConfig, TreesConfig
from specrouter.config.server import ServerConfig, is_api_key
from specrouter.config.slo_class import SloConfig, slos_by_class

__all__ = [
    "TREE_SLOTS",
    "ClusterConfig",
    "EngineConfig",
    "ResumeConfig",
    "RouterConfig",
    "RoutingConfig",
    "SchedulerConfig",
    "ServerConfig",
    "SloConfig",
    "TreesConfig",
    "check_chain",
    "is_api_key",
    "slos_by_class",
]
