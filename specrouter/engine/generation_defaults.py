"""Sampling parameters that a checkpoint recommends, for requests that do not say their own.

Source: transformers' generation_config.json. As `generate` has it, nothing is sampled without
`do_sample`, and with it the temperature is 1 where the file says none.
"""

import json
from typing import Any

from modelpool import ModelPool
from modelpool.errors import ConfigError
from specrouter.config import RouterConfig
from specrouter.request.params import SAMPLING, RequestError, SamplingParams


def generation_defaults(config: RouterConfig, pool: ModelPool) -> dict[str, Any]:
    """Of the fields `SAMPLING`, those that the target's file has; none with `neutral`.

    Raises `ConfigError` for values that no request may have. The pool has read the file before.
    """
    if config.engine.generation_defaults == "neutral":
        return {}
    file = pool.path(pool.target) / "generation_config.json"
    found = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    given = {name: found[name] for name in SAMPLING if found.get(name) is not None}
    if found.get("do_sample") is True:
        given.setdefault("temperature", 1.0)
    else:
        given["temperature"] = 0.0
    try:
        SamplingParams(**given)
    except RequestError as error:
        raise ConfigError("engine.generation_defaults", f"{str(file)!r}: {error}") from error
    return given
