"""The key that a benchmark sends to a server which asks for one.

Contract: its text is in no message and in no document.
"""

import os
import urllib.request

from modelpool.errors import ConfigError
from specrouter.config import is_api_key

# The service's own: `specrouter.http.guards` has it too, and imports a web framework.
SERVICE_VARIABLE = "SPECROUTER_API_KEY"
OPENAI_VARIABLE = "OPENAI_API_KEY"


def read_api_key(variable: str, given: str | None = None) -> str | None:
    """`given` by --api-key, or what the environment has; None: neither, or an empty variable.

    Raises `ConfigError` for one that cannot be sent.
    """
    key = os.environ.get(variable) or None if given is None else given
    if key is not None and not is_api_key(key):
        reason = "must be printable ASCII without spaces"
        raise ConfigError(variable if given is None else "--api-key", reason)
    return key


def authorize(request: urllib.request.Request, key: str | None) -> None:
    """Not for whom the server may redirect to."""
    if key is not None:
        request.add_unredirected_header("Authorization", f"Bearer {key}")
