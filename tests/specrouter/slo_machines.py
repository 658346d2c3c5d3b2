"""SLOs-Serve's machines: the coefficients that its artifact publishes, in milliseconds."""

from research.sim.roofline import RooflineTime
from specrouter.profile.batch_time import BatchTime
from specrouter.slo.serve.amortized import Amortized
from specrouter.slo.serve.policy import PacingOf

# [k1, k2, b] of two terms: OPT with the drafter OPT-125m on A100s.
OPT_7B = RooflineTime(((6.878e-2, 1.249e-3, 24.80), (7.523e-2, 3.465, 3.033)))
OPT_13B = RooflineTime(((7.213e-2, 3.341, 31.73), (0.0, 3.014, 1.239e-2)))
OPT_30B = RooflineTime(((9.314e-2, 2.797, 37.88), (0.0, 3.014, 1.239e-2)))


def amortized(times: BatchTime, idle_ms: float, alpha: float, chunk: int) -> PacingOf:
    pacing = Amortized(times, idle_ms, alpha, chunk=chunk)
    return lambda view: pacing
