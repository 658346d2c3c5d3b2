"""ServerConfig: the HTTP service."""

import re
from pathlib import Path
from typing import Literal

from pydantic import Field, field_validator, model_validator

from modelpool.checkpoint.cache_dir import expanded
from modelpool.errors import ConfigError
from specrouter.config.strict import Strict

_API_KEY = re.compile(r"[!-~]+")
_HOST = re.compile(r"[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*")
_ORIGIN = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://([^\s/?#@:\[\]]+|\[[0-9A-Fa-f:.]+\])(:\d{1,5})?")

ToolParser = Literal["auto", "none", "hermes", "llama3_json"]
ReasoningParser = Literal["auto", "none", "harmony", "think"]


class ServerConfig(Strict):
    """The HTTP service.

    Attributes:
        host: address to listen on; 0.0.0.0 for all interfaces.
        port: port to listen on; 0 for any free one.
        max_waiting: requests that may wait; further ones get 503.
        max_choices: maximum prompts times samples of an HTTP request.
        max_body_bytes: maximum size of a request body.
        max_inflight_body_bytes: maximum size of all unanswered bodies over 64 KiB; further ones get
            503.
        limit_concurrency: maximum connections, and requests in progress; beyond it idle connections
            are closed, and requests get 503.
        request_timeout_s: maximum seconds of a request, waiting included.
        drain_s: seconds that running requests may continue after a stop signal.
        api_keys: keys for `Authorization: Bearer KEY`, besides SPECROUTER_API_KEY. Without any, the
            service is open to all.
        cors_origins: origins of web pages that may call the service; "*" for any.
        log_format: format of the log on stderr.
        chat_template: file with a Jinja template that replaces the tokenizer's.
        literal_user_text: reads special tokens in user and tool messages, such as `<|im_end|>`, as
            plain text; the template's own stay special.
        page: serves [the page](operation.md#the-page) at `/`.
        page_hosts: further host names of the page, besides IP addresses, localhost, `*.internal`,
            `host` and this machine's name; on a loopback address without API keys, of all paths.
        tool_parser: format of tool calls: `hermes` (Qwen, Hermes), `llama3_json` (Llama 3.1 to
            3.3), `auto` (by the chat template); `none` leaves calls in the text.
        reasoning_parser: format of `reasoning_content` in chats: `harmony` (gpt-oss), `think`
            (`<think>` tags or similar), `auto` (by the chat template); `none` leaves it in the
            text.
    """

    host: str = "127.0.0.1"
    port: int = Field(default=8000, ge=0, le=65535)
    max_waiting: int = Field(default=256, ge=1)
    max_choices: int = Field(default=128, ge=1)
    max_body_bytes: int = Field(default=4 * 2**20, ge=1024)
    max_inflight_body_bytes: int = Field(default=64 * 2**20, ge=1024)
    limit_concurrency: int = Field(default=512, ge=1)
    request_timeout_s: float = Field(default=600.0, gt=0, allow_inf_nan=False)
    drain_s: float = Field(default=30.0, ge=0, allow_inf_nan=False)
    api_keys: tuple[str, ...] = Field(default=(), repr=False)
    cors_origins: tuple[str, ...] = ()
    log_format: Literal["text", "json"] = "text"
    chat_template: Path | None = None
    literal_user_text: bool = False
    page: bool = True
    page_hosts: tuple[str, ...] = ()
    tool_parser: ToolParser = "auto"
    reasoning_parser: ReasoningParser = "auto"

    @model_validator(mode="after")
    def _has_room_for_one_body(self) -> "ServerConfig":
        if self.max_inflight_body_bytes < self.max_body_bytes:
            reason = f"must be at least server.max_body_bytes, {self.max_body_bytes}"
            raise ConfigError("max_inflight_body_bytes", reason)
        return self

    @field_validator("api_keys")
    @classmethod
    def _keys_can_be_sent(cls, keys: tuple[str, ...]) -> tuple[str, ...]:
        for number, key in enumerate(keys, start=1):
            if not is_api_key(key):  # its text is a secret: errors must not contain it
                raise ConfigError("", f"key {number} must be printable ASCII without spaces")
        return keys

    @field_validator("page_hosts")
    @classmethod
    def _hosts_are_names(cls, hosts: tuple[str, ...]) -> tuple[str, ...]:
        for host in hosts:
            if not _HOST.fullmatch(host):
                raise ConfigError("", f"{host!r} is no host name: give it without scheme and port")
        return tuple(host.lower() for host in hosts)

    @field_validator("chat_template")
    @classmethod
    def _of_the_user(cls, file: Path | None) -> Path | None:
        return file and expanded(file)

    @field_validator("cors_origins")
    @classmethod
    def _origins_are_what_browsers_send(cls, origins: tuple[str, ...]) -> tuple[str, ...]:
        for origin in origins:
            if origin != "*" and not _ORIGIN.fullmatch(origin):
                raise ConfigError("", f'{origin!r} is neither "*" nor scheme://host[:port]')
        return origins


def is_api_key(text: str) -> bool:
    """Return True if a client can send the key in a header."""
    return _API_KEY.fullmatch(text) is not None
