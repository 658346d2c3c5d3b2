"""Conditions of a measurement (machine, models, versions), and formats of figures in tables."""

import json
import platform
from collections.abc import Mapping
from typing import Any

import torch
import transformers

from modelpool import ModelPool
from modelpool.config import ModelConfig
from modelpool.fast.model_key import cpu_name as cpu_name
from specrouter.config import TREE_SLOTS, RouterConfig
from specrouter.router import ChainRouter
from statemgr import row_tokens


def conditions(router: ChainRouter) -> dict[str, Any]:
    """Return the conditions as JSON has them, with inflated models marked.

    Call it after the runs, when the models in use are loaded.
    """
    pool = router.pool
    target = pool.get(pool.target)
    device = target.device
    is_cuda = device.type == "cuda"
    return {
        "cpu": cpu_name(),
        "gpu": torch.cuda.get_device_name(device) if is_cuda else None,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
        "target": pool.target,
        "dtype": str(target.dtype).removeprefix("torch."),
        "models": {
            model.name: _model(pool, model)
            for model in pool.config.models
            if model.name in pool.names
        },
    }


def _model(pool: ModelPool, model: ModelConfig) -> dict[str, Any]:
    if not model.has_model:
        return {"parameters": 0, "dtype": None, "weights": None, "is_inflated": False}
    # "auto" is resolved only in a loaded model.
    loaded = str(pool.get(model.name).dtype) if pool.is_loaded(model.name) else None
    config = json.loads((pool.path(model.name) / "config.json").read_text(encoding="utf-8"))
    return {
        "parameters": pool.parameter_count(model.name),
        "dtype": loaded.removeprefix("torch.") if loaded else None,
        "weights": pool.plan(model.name).weights,
        "is_inflated": bool(config.get("specrouter_inflated", False)),
    }


def request_limit(config: RouterConfig, pool: ModelPool) -> int:
    """Return the most tokens of a request that every model can read and the memory can hold."""
    kv_tokens = pool.kv_tokens or config.engine.kv_tokens(pool.longest_sequence)
    longest = config.engine.max_request_tokens(pool.longest_sequence, kv_tokens)
    if config.engine.kv_memory is not None:
        longest = min(longest, row_tokens(pool.kv_tokens, TREE_SLOTS))
    return min(longest, config.engine.kv_budget_tokens or longest)


def model_sizes(conditions: Mapping[str, Any]) -> str:
    """Return the models' sizes, such as `small 1.1M, big 201.9M int8 (inflated)`."""
    parts = []
    for name, model in conditions["models"].items():
        size = f" {model['parameters'] / 1e6:.1f}M" if model["parameters"] else ""
        weights = model.get("weights")
        kept = "" if weights in (None, "plain") else f" {weights}"
        parts.append(f"{name}{size}{kept}{' (inflated)' if model['is_inflated'] else ''}")
    return ", ".join(parts)


def number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.0%}"
