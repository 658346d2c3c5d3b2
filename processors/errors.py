"""Errors of the data plane."""


class NonFiniteLogits(RuntimeError):
    """A model's logits hold NaN, or leave no token to choose; its cache may hold NaN too."""
