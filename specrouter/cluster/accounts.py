"""ClusterAccounts: what requests of a cluster came to, whichever replicas served them.

A request that two replicas served is one request here, with the times that its caller saw.
"""

import time
from collections.abc import Callable, Iterator, Sequence

from prometheus_client.metrics_core import Metric

from specrouter.cluster.link import ReplicaReport
from specrouter.cluster.totals import total
from specrouter.engine.request_meter import RequestMeter
from specrouter.engine.slo_accounts import AdmissionCounts, SlackFigures, SloAccounts
from specrouter.request.output import RequestOutput


class ClusterAccounts(SloAccounts):
    """Args: `reports`: of the replicas, which count what their admission decides."""

    def __init__(self, reports: Callable[[], Sequence[ReplicaReport]], meter: RequestMeter) -> None:
        super().__init__()
        self._reports = reports
        self._meter = meter

    def ended(self, output: RequestOutput, elapsed_s: float) -> None:
        """A sample has ended, so long after it was submitted."""
        now_s = time.monotonic()
        self.record(output.metrics, output.metrics.output_tokens, now_s - elapsed_s, now_s)
        self._meter.record(output, elapsed_s)

    def ended_requests(self) -> Iterator[Metric]:
        return self._meter.collect()

    def admissions(self) -> dict[str, AdmissionCounts]:
        every = [report.admission_counts for report in self._reports()]
        return dict(total(every)) if every else {}

    def slack(self) -> SlackFigures:
        every = [report.slack for report in self._reports()]
        return total(every) if every else super().slack()
