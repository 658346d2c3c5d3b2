"""Metrics of the models: their forwards, memory and failures, and what is estimated of them."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from heapq import nlargest

from prometheus_client.metrics_core import Metric

from specrouter.engine.engine_state import EngineState
from specrouter.http.prometheus_families import Values, counter, gauge, joined
from specrouter.profile.profiler import EngineStatistics
from specrouter.profile.snapshot import PerformanceSnapshot

PREDICTED_TOKENS = (1, 8, 64)  # n of the T(n) that are shown
_TREES = 64  # estimates of drafters and verifiers that are shown, those with most evidence


def model_metrics(
    names: Sequence[str], state: EngineState, totals: EngineStatistics, known: PerformanceSnapshot
) -> Iterator[Metric]:
    yield from _forwards(names, totals, known)
    yield from _states(names, state)


def _forwards(
    names: Sequence[str], totals: EngineStatistics, known: PerformanceSnapshot
) -> Iterator[Metric]:
    def of(value: Callable[[str], float]) -> Values:
        return {(name,): value(name) for name in names}

    model = ("model",)
    yield counter(
        "specrouter_model_forwards",
        "Forward passes of a model.",
        of(lambda name: totals.forwards.get(name, 0)),
        model,
    )
    yield counter(
        "specrouter_model_tokens",
        "Input tokens of a model's forward passes.",
        of(lambda name: totals.pack_tokens.get(name, 0)),
        model,
    )
    yield counter(
        "specrouter_model_seconds",
        "Time spent in a model's forward passes.",
        of(lambda name: totals.model_ms.get(name, 0.0) / 1000),
        model,
    )
    yield gauge(
        "specrouter_model_predicted_seconds",
        "T(n): predicted duration of a forward pass over n tokens.",
        {
            (name, str(tokens)): known.machine * curve.at(tokens) / 1000
            for name, curve in known.times.items()
            for tokens in PREDICTED_TOKENS
        },
        ("model", "tokens"),
    )


def _states(names: Sequence[str], state: EngineState) -> Iterator[Metric]:
    def of(value: Callable[[str], float]) -> Values:
        return {(name,): value(name) for name in names}

    model = ("model",)
    yield gauge(
        "specrouter_model_loaded",
        "1 if a model is loaded.",
        of(lambda name: float(name in state.weight_bytes)),
        model,
    )
    yield gauge(
        "specrouter_model_memory_bytes",
        "Memory of a model's weights and of its KV cache.",
        {
            **{(name, "weights"): state.weight_bytes.get(name, 0) for name in names},
            **{(name, "kv"): state.kv_bytes.get(name, 0) for name in names},
        },
        ("model", "kind"),
    )
    yield counter(
        "specrouter_model_quarantines",
        "Failures after which a model was not used for a while.",
        of(lambda name: state.quarantines.get(name, 0)),
        model,
    )
    yield gauge(
        "specrouter_model_quarantined",
        "1 while a model is not used after a failure.",
        of(lambda name: float(name in state.quarantined)),
        model,
    )


def estimate_metrics(known: PerformanceSnapshot) -> Iterator[Metric]:
    yield from _similarities(known)
    yield from _acceptances(known)


def _similarities(known: PerformanceSnapshot) -> Iterator[Metric]:
    yield gauge(
        "specrouter_similarity_ratio",
        "SimScore: 1 - total variation distance of two models' distributions.",
        {(drafter, verifier): score for (drafter, verifier), score in known.similarity.items()},
        ("drafter", "verifier"),
    )
    yield gauge(
        "specrouter_predicted_acceptance_ratio",
        "Acceptance rate predicted from the similarity, f(SimScore).",
        {
            (drafter, verifier, _flag(sampled)): alpha
            for (drafter, verifier, sampled), alpha in known.promised_alpha.items()
        },
        ("drafter", "verifier", "sampled"),
    )


def _acceptances(known: PerformanceSnapshot) -> Iterator[Metric]:
    shown = nlargest(_TREES, known.trees.items(), key=lambda each: each[1].trials)
    labels = ("proposers", "verifier", "sampled")
    keys = [
        (joined(proposers), verifier, _flag(sampled)) for (proposers, verifier, sampled), _ in shown
    ]
    trees = [each for _, each in shown]
    calibrations = [each.calibration for each in trees]

    def of_trees(name: str, documentation: str, values: Iterable[float]) -> Metric:
        return gauge(name, documentation, dict(zip(keys, values, strict=True)), labels)

    yield of_trees(
        "specrouter_acceptance_ratio",
        "Acceptance rate of the most likely child of an accepted node.",
        (each.alpha for each in trees),
    )
    yield of_trees(
        "specrouter_calibration_error_ratio",
        "Expected calibration error (ECE) of predicted acceptance.",
        (each.expected_error for each in calibrations),
    )
    yield of_trees(
        "specrouter_calibration_brier_ratio",
        "Brier score (mean squared error) of predicted acceptance.",
        (each.brier for each in calibrations),
    )
    yield of_trees(
        "specrouter_calibration_nodes",
        "Nodes behind both errors, older ones with lower weight.",
        (each.nodes for each in calibrations),
    )


def _flag(value: bool) -> str:
    return "true" if value else "false"
