"""FlowGuard as it is printed, by states as old as they are."""

from research.policies.flowguard_printed import FLOWGUARD_PRINTED
from specrouter.config.policies import REPLICA_POLICIES
from tests.specrouter.cluster.states import state, view
from tests.specrouter.cluster.test_policy import burst, ranked


def test_a_configuration_names_it() -> None:
    for name in ("flowguard-printed", "research.policies:FLOWGUARD_PRINTED"):
        assert REPLICA_POLICIES.find(name) is FLOWGUARD_PRINTED


def test_what_was_sent_since_a_replica_told_its_state_is_not_seen() -> None:
    """Of 8 requests at once, metrics of 500 ms ago send all to one."""
    assert burst("flowguard-printed") == {"a": 8, "b": 0}


def test_the_queue_alone_is_read_at_each_choice() -> None:
    told = state()
    views = [view("a", state(4), told=told), view("b", state(), told=told)]
    assert ranked("flowguard-printed", views).order == ("a", "b"), "running ones are not seen"
    views = [view("a", state(0, 4), told=told), view("b", state(), told=told)]
    assert ranked("flowguard-printed", views).order == ("b", "a")
