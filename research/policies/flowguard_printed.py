"""FlowGuard with metrics as old as they are, as StreamServe prints it (arXiv 2604.09562)."""

from specrouter.cluster import flowguard
from specrouter.cluster.policy import ReplicaPolicy, RoutingSettings, Views, guarded, hit_rate
from specrouter.cluster.state import Ranking, RoutedRequest


def _flowguard_printed(request: RoutedRequest, views: Views, settings: RoutingSettings) -> Ranking:
    """Metrics as old as they are; the queue alone is read at each choice (Algorithm 2)."""
    workers = [
        flowguard.metrics_of(
            view.reported,
            view.state.waiting,
            view.reported.running,
            hit_rate(request, view),
            settings.longest_queue,
        )
        for view in views
    ]
    return guarded(views, workers)


FLOWGUARD_PRINTED = ReplicaPolicy(_flowguard_printed)
