"""Usual lengths of outputs, by class."""

from specrouter.profile.output_lengths import OutputLengths


def test_a_quantile_is_the_least_length_that_so_many_do_not_exceed() -> None:
    lengths = OutputLengths()
    for tokens in range(1, 11):
        lengths.record("chat", tokens)
        lengths.record(None, 100 * tokens)
    assert lengths.quantiles(0.9) == {"chat": 9.0, None: 900.0}
    assert lengths.quantiles(1.0)["chat"] == 10.0
    assert lengths.quantiles(0.05)["chat"] == 1.0


def test_little_evidence_tells_nothing_and_old_evidence_goes() -> None:
    lengths = OutputLengths()
    for _ in range(7):
        lengths.record("chat", 5)
    assert lengths.quantiles() == {}
    for _ in range(300):
        lengths.record("chat", 50)
    assert lengths.quantiles(0.01) == {"chat": 50.0}
