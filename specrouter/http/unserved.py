"""What a request is told whose path is none of ours: what was asked, and where the like is served.

Contract: pure; a message holds at most so much of a path, and nothing of its query.
"""

from __future__ import annotations

_LONGEST_PATH = 80
_CHATS = "chats are at /v1/chat/completions"
_COMPLETIONS = "completions at /v1/completions"
_EVERYTHING = f"{_CHATS}, {_COMPLETIONS}"
_NO_SUCH_MODEL = f"the model that is served makes text: {_EVERYTHING}"

# By a word of the path, what is said of it. The first that fits.
_HINTS = (
    ("responses", _CHATS),
    ("messages", _CHATS),
    ("threads", _CHATS),
    ("assistants", _CHATS),
    ("chat", _CHATS),
    ("complet", f"{_COMPLETIONS}, {_CHATS}"),
    ("infill", f"{_COMPLETIONS}; no text is filled in"),
    ("generate", "/generate takes one prompt"),
    ("embed", _NO_SUCH_MODEL),
    ("rerank", _NO_SUCH_MODEL),
    ("score", _NO_SUCH_MODEL),
    ("images", _NO_SUCH_MODEL),
    ("audio", _NO_SUCH_MODEL),
    ("moderations", _NO_SUCH_MODEL),
    ("model", "the model that is served is at /v1/models"),
    ("token", "tokens are at /tokenize and /detokenize"),
    ("metrics", "metrics are at /metrics"),
    ("health", "health is at /health"),
)


def no_such_path(method: str, path: str) -> str:
    """For a 404: `path` is not served, with any method."""
    words = path.lower()
    hint = next((said for word, said in _HINTS if word in words), _EVERYTHING)
    return f"no {method} {_short(path)} here; {hint}; see /docs"


def no_such_method(method: str, path: str, allowed: str | None) -> str:
    """For a 405. Args: `allowed`: the methods that the path has, as HTTP's header `Allow`."""
    takes = f"; it takes {allowed}" if allowed else ""
    return f"no {method} {_short(path)} here{takes}; see /docs"


def _short(path: str) -> str:
    return path if len(path) <= _LONGEST_PATH else f"{path[:_LONGEST_PATH]}..."
