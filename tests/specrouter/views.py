"""Views of an engine and of its requests, usual but for what a test says."""

from typing import Any

from specrouter.view import EngineView, RequestView
from tests.specrouter.predictions import ALL, snapshot


def request_view(number: int, **given: Any) -> RequestView:
    """Of a request that decodes."""
    usual = {"priority_key": 0.0, "arrived_s": 0.0, "kv_tokens": 256, "prompt_left": 0}
    usual |= {"remaining": 64, "max_new_tokens": 128}
    return RequestView(id=number, **{**usual, **given})


def engine_view(**given: Any) -> EngineView:
    """Of no requests; all models that are available are loaded."""
    usual = {"cycle": 0, "now_s": 0.0, "running": (), "waiting": (), "free_rows": 0}
    available = given.get("available", ALL)
    usual |= {"kv_free_tokens": None, "available": available, "loaded": available}
    return EngineView(**{**usual, "performance": snapshot({}), **given})
