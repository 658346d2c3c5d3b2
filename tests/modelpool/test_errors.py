"""Errors of a configuration carry the field and the reason apart."""

from modelpool.errors import ConfigError, UnsupportedModelError


def test_the_message_is_field_and_reason() -> None:
    error = ConfigError("pool.target", "is missing")
    assert (error.field, error.reason, str(error)) == (
        "pool.target",
        "is missing",
        "pool.target: is missing",
    )
    assert isinstance(error, ValueError)


def test_an_unsupported_model_is_an_error_of_the_configuration() -> None:
    assert issubclass(UnsupportedModelError, ConfigError)
