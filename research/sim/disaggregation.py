"""What prompts and outputs on separate devices can serve, in closed form: DistServe's bound.

As the text has it: prefill devices read at their greatest throughput, decoding ones hold as many
requests as a batch of the TPOT allows, and both scale with their number. Nothing is lost to TTFT,
transfer, bursts or memory, so a simulated system is compared with more than DistServe attains.
Pure. Source: SLOs-Serve (arXiv 2504.08784), Appendix A.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from specrouter.profile.batch_time import BatchTime

PUBLISHED_SPLITS = ((1, 1), (2, 1), (1, 2))  # of prefill and decoding devices, section 6
_LARGE = 1 << 15  # tokens of a batch whose fixed part does not count


@dataclass(frozen=True)
class Disaggregated:
    """`requests_per_s`: of each device."""

    prefill_devices: int
    decode_devices: int
    requests_per_s: float


def disaggregated(
    times: BatchTime,
    tpot_ms: float,
    input_tokens: float,
    output_tokens: float,
    splits: Sequence[tuple[int, int]] = PUBLISHED_SPLITS,
) -> Disaggregated:
    """The best of the splits, for requests of such mean lengths."""
    token_ms, overhead_ms = _line(times)
    share = max(0.0, (tpot_ms - overhead_ms) / tpot_ms)

    def rate(prefill: int, decode: int) -> float:
        bound = min(prefill / input_tokens, share * decode / output_tokens)
        return 1000.0 / token_ms * bound / (prefill + decode)

    best = max(splits, key=lambda split: rate(*split))
    return Disaggregated(*best, rate(*best))


def ideal(
    times: BatchTime, tpot_ms: float, input_tokens: float, output_tokens: float
) -> Disaggregated:
    """Equation 4: with as many devices of each kind as balance (their numbers are shares here)."""
    token_ms, overhead_ms = _line(times)
    share = max(0.0, (tpot_ms - overhead_ms) / tpot_ms)
    if not share:
        return Disaggregated(0, 0, 0.0)
    return Disaggregated(0, 0, 1000.0 / token_ms / (output_tokens / share + input_tokens))


def _line(times: BatchTime) -> tuple[float, float]:
    """BatchTime(n) = n / MaxTokenTpt + Overhead: ms of a token, and ms beside them."""
    token_ms = (times.ms(2 * _LARGE) - times.ms(_LARGE)) / _LARGE
    return token_ms, times.ms(_LARGE) - token_ms * _LARGE
