"""Registry: policies of one kind by name, built-in ones and the user's own.

A built-in policy is imported when it is first used. A user's policy is registered in Python
(`register`), or named `package.module:NAME` in a configuration file (`find`), and then imported in
every process that reads the configuration, replicas included. Requests cannot name policies.
"""

from collections.abc import Mapping
from importlib import import_module
from typing import Any

from modelpool.errors import ConfigError


class Registry:
    """Policies of one kind by name.

    Args:
        kind: the kind in error messages, such as "chain policy".
        base: "module:Class" of which each policy must be an instance.
        built_in: "module:NAME" by name.
    """

    def __init__(self, kind: str, base: str, built_in: Mapping[str, str]) -> None:
        self._kind = kind
        self._base = base
        self._built_in = built_in
        self._own: dict[str, Any] = {}
        self._imported: dict[str, Any] = {}  # built-in ones, and package.module:NAME

    @property
    def names(self) -> tuple[str, ...]:
        """Names of all registered policies, built-in ones first."""
        return (*self._built_in, *self._own)

    def register(self, name: str, policy: Any) -> None:
        """Register `policy` as `name`, which may replace an earlier policy of the user's.

        Raises:
            ValueError: `name` is the name of a built-in policy.
            TypeError: it is not a policy of this kind.
        """
        if name in self._built_in:
            raise ValueError(f"{name!r} is a {self._kind} that comes with SpecRouter")
        self._own[name] = self._checked(name, policy)

    def check(self, name: str) -> None:
        """Raise `ConfigError` if there is no such policy.

        A built-in policy is not imported: it needs PyTorch, and other errors of a configuration
        should not wait for that import.
        """
        if name not in self._built_in:
            self.find(name)

    def find(self, name: str) -> Any:
        """Return the policy of this name; one named `package.module:NAME` is imported.

        Raises:
            ConfigError: there is none, or it cannot be imported. The caller sets its field.
        """
        if name in self._own:
            return self._own[name]
        if name not in self._imported:
            address = self._built_in.get(name, name)
            module, colon, attribute = address.partition(":")
            if not (colon and module and attribute):
                raise ConfigError(
                    "",
                    f"no {self._kind} {name!r}; there are {', '.join(self.names)}, and one's own as"
                    " package.module:NAME",
                )
            self._imported[name] = self._import(name, module, attribute)
        return self._imported[name]

    def _import(self, name: str, module: str, attribute: str) -> Any:
        try:
            return self._checked(name, getattr(import_module(module), attribute))
        except Exception as error:  # an import can raise anything
            reason = " ".join(str(error).split())  # on one line
            raise ConfigError(
                "", f"{self._kind} {name!r}: {type(error).__name__}: {reason}"
            ) from error

    def _checked(self, name: str, policy: Any) -> Any:
        module, _, base = self._base.partition(":")
        if not isinstance(policy, getattr(import_module(module), base)):
            raise TypeError(f"{name!r} must be an instance of {module}.{base}")
        return policy
