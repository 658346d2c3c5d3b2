"""The configuration: one YAML file per scenario, one tree of strict models."""

from specrouter.config.cluster import ClusterConfig, ResumeConfig, RoutingConfig
from specrouter.config.engine import TREE_SLOTS, AdmissionName, EngineConfig
from specrouter.config.router import RouterConfig, check_chain
from specrouter.config.scheduler import Policy, SchedulerConfig
from specrouter.config.server import ServerConfig, is_api_key
from specrouter.config.slo_class import SloConfig, slos_by_class
from specrouter.config.trees import Selection, TreesConfig

__all__ = [
    "TREE_SLOTS",
    "AdmissionName",
    "ClusterConfig",
    "EngineConfig",
    "Policy",
    "ResumeConfig",
    "RouterConfig",
    "RoutingConfig",
    "SchedulerConfig",
    "Selection",
    "ServerConfig",
    "SloConfig",
    "TreesConfig",
    "check_chain",
    "is_api_key",
    "slos_by_class",
]
