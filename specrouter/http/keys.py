"""Access to the service: its API keys, and warnings about what is open without one."""

from __future__ import annotations

import ipaddress
import os
from collections.abc import Iterator

from modelpool.errors import ConfigError
from specrouter.config import ServerConfig, is_api_key
from specrouter.http_client import API_KEY_VARIABLE


def api_keys(config: ServerConfig) -> tuple[str, ...]:
    """Return the configured keys and the environment's; without any, the service is open to all.

    Raises `ConfigError` if the variable is set to an invalid key: its user wants access limited.
    """
    own = os.environ.get(API_KEY_VARIABLE)
    if own is None:
        return config.api_keys
    if not is_api_key(own):
        raise ConfigError(API_KEY_VARIABLE, "must be printable ASCII without spaces, or unset")
    return (*config.api_keys, own)


def network_warnings(server: ServerConfig) -> Iterator[str]:
    """Yield warnings about access to the service without a key."""
    if api_keys(server):
        return
    if not is_loopback(server.host):
        yield f"server.host: {server.host} is open to the network, and there are no api_keys"
    if "*" in server.cors_origins:
        yield "server.cors_origins: any web page may use the service, and there are no api_keys"


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"
