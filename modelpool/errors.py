"""Errors of a configuration, always with the name of the field."""


class ConfigError(ValueError):
    """A configuration that cannot be served.

    `field` is the dotted path of the setting, such as `pool.models[1].source`; `reason` says
    what is wrong with it and, where there is a remedy, what to do.
    """

    def __init__(self, field: str, reason: str) -> None:
        super().__init__(f"{field}: {reason}" if field else reason)
        self.field = field
        self.reason = reason


class DoesNotFitError(ConfigError):
    """A target that this machine's devices have no memory for."""


class UnsupportedModelError(ConfigError):
    """A model whose architecture the attention plug-in cannot serve exactly."""


class PoolFullError(RuntimeError):
    """A model cannot be loaded within the pool's limits while the others are in use."""


class UnsupportedAttention(Exception):
    """The model asks its attention for something that the plug-in does not honour."""
