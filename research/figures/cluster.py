"""Clusters: how capacity grows with replicas, FlowGuard's herd, StreamServe's ablation (arXiv
2604.09562, Table 8), and overload."""

from collections.abc import Sequence
from dataclasses import replace

from research.figures.cell import Cell
from research.figures.cluster_cell import WHOLE, ClusterKind
from research.figures.figure import Axis, Figure, Scope

_OPT = "slos-serve-opt-6.7b"
_ACCEPTANCE = 0.7
_CAPACITY = (("capacity", "capacity of each, requests/s at 90% attained"),)
_ROUTING: tuple[str, ...] = (
    "slo",
    "flowguard",
    "flowguard-printed",
    "round-robin",
    "join-shortest",
    "p2c",
)
_ASSUMED = (
    "OPT-6.7B and SLOs-Serve's ChatBot as in its figures; requests are so many for each replica. "
    "States are told every 0.5 s and with answers; a message takes 0.6 ms, as measured on one "
    "machine. Replicas' own policy is the default, `slo`."
)
# Llama-2-7B in 16 bit, Equation 5 as it is meant: 2 x 32 layers x 4096 x 2 bytes a token.
_KV_BYTES = 524_288
_NIXL_GB_S, _STORE_GB_S = 200.0, 0.87  # NVLink; an object store that takes 60 ms for 50 MiB


def _cells(
    scope: Scope,
    policies: Sequence[str],
    replicas: Sequence[int],
    kind: ClusterKind = WHOLE,
) -> list[Cell]:
    """Capacities."""
    requests = 20 if scope.is_quick else scope.requests
    return [
        Cell(
            machine=_OPT,
            workload="ChatBot",
            policy="slo",
            rate=6.0,
            requests=requests * count,
            seed=seed,
            acceptance=_ACCEPTANCE,
            measure="capacity",
            replicas=count,
            traces=scope.traces,
            routing=policy,
            cluster=kind,
        )
        for count in scope.pick(replicas, replicas[:1])
        for policy in scope.pick(policies, policies[:2])
        for seed in scope.all_seeds
    ]


def _scale(scope: Scope) -> list[Cell]:
    return _cells(scope, ("slo", "round-robin"), (1, 2, 3, 4, 8, 16))


def _equal(scope: Scope) -> list[Cell]:
    return _cells(scope, _ROUTING, (2, 4, 8, 16))


def _unequal(scope: Scope) -> list[Cell]:
    halves = ClusterKind(name="half", slow=2.0)
    one = ClusterKind(name="one of four", slow=2.5, slow_of=4)
    return [
        *_cells(scope, _ROUTING, (2, 4, 8, 16), halves),
        *_cells(scope, _ROUTING, (4, 8, 16), one),
    ]


def _herd(scope: Scope) -> list[Cell]:
    cells = _cells(scope, _ROUTING, (2, 4, 8, 16))
    return [replace(cell, measure="routing", rate=9.0) for cell in cells]


def _failures(scope: Scope) -> list[Cell]:
    kind = ClusterKind(name="each fails once a minute", mean_up_s=60.0)
    cells = _cells(scope, ("slo", "round-robin"), (4, 16), kind)
    return [replace(cell, measure="routing", rate=6.0) for cell in cells]


def _overload(scope: Scope) -> list[Cell]:
    kind = ClusterKind(name="refuses", max_waiting=512, rejects=True)
    cells = _cells(scope, ("slo",), (2, 4), kind)
    return [replace(cell, measure="overload", rate=9.0) for cell in cells]


def _ablation(scope: Scope) -> list[Cell]:
    """Two pairs, or four replicas: the same number of machines."""
    nixl, store = (_KV_BYTES / bandwidth / 1e6 for bandwidth in (_NIXL_GB_S, _STORE_GB_S))
    pair, slow = ClusterKind(kv_ms_per_token=nixl), ClusterKind(kv_ms_per_token=store)
    variants: list[tuple[str, str, str, ClusterKind, int]] = [
        ("full", "specustream", "flowguard-printed", pair, 2),
        ("object store in the place of NIXL", "specustream", "flowguard-printed", slow, 2),
        ("fixed depth", "spec-4", "flowguard-printed", pair, 2),
        ("round robin", "specustream", "round-robin", pair, 2),
        ("no SpecuStream", "target-only", "flowguard-printed", pair, 2),
        ("monolithic", "specustream", "flowguard-printed", WHOLE, 4),
        ("neither", "target-only", "round-robin", pair, 2),
        ("ours: adaptive, `slo`, pairs", "goodput", "slo", pair, 2),
        ("ours: adaptive, `slo`, whole", "goodput", "slo", WHOLE, 4),
    ]
    requests = 40 if scope.is_quick else scope.requests
    return [
        Cell(
            machine="specrouter-llama2-7b",
            workload="Summarizer",
            policy=policy,
            rate=8.0 / replicas,
            requests=requests,
            seed=seed,
            acceptance=0.75,
            measure="routing",
            replicas=replicas,
            routing=routing,
            cluster=replace(kind, name=name),
        )
        for name, policy, routing, kind, replicas in variants
        for seed in scope.all_seeds
    ]


FIGURES = (
    Figure(
        name="cluster-scale",
        title="Capacity of each of 1 to 16 replicas of a cluster",
        cells=_scale,
        axis=Axis("replicas", "replicas", _CAPACITY, line="routing"),
        published=(
            "SLOs-Serve figure 13: ChatBot on 2, 3, 4 replicas 2.18, 3.36, 4.61 times one's "
            "capacity in total; nothing beyond 4."
        ),
        assumed=_ASSUMED,
    ),
    Figure(
        name="cluster-equal",
        title="Routing policies on equal replicas",
        cells=_equal,
        axis=Axis("replicas", "replicas", _CAPACITY, line="routing"),
        published=(
            "StreamServe Table 8: 520 tokens/s with round robin, 814 with FlowGuard, on 2 pairs."
        ),
        assumed=_ASSUMED,
    ),
    Figure(
        name="cluster-unequal",
        title=(
            "Routing policies where every second replica has 0.5 of the speed, or every fourth 0.4"
        ),
        cells=_unequal,
        axis=Axis("replicas", "replicas", _CAPACITY, ("variant",), "routing"),
        published="no paper has unequal replicas.",
        assumed=_ASSUMED,
    ),
    Figure(
        name="cluster-herd",
        title="FlowGuard's herd: 9 requests/s of each replica",
        cells=_herd,
        axis=Axis(
            "replicas",
            "replicas",
            (
                ("crowding", "largest share of half a second, over an even one"),
                ("attained", "share in time"),
            ),
            line="routing",
        ),
        published=(
            "nothing: StreamServe's states are 500 ms old, and what that does is not discussed."
        ),
        assumed=_ASSUMED,
    ),
    Figure(
        name="cluster-failures",
        title="Replicas that die or hang once a minute each, for 12 s: 6 requests/s of each",
        cells=_failures,
        axis=Axis(
            "replicas",
            "replicas",
            (
                ("attained", "share in time"),
                ("moves", "moves"),
                ("lost", "requests lost"),
                ("refused", "requests refused"),
            ),
            line="routing",
        ),
        published="no paper serves through failures.",
        assumed=_ASSUMED,
    ),
    Figure(
        name="cluster-overload",
        title="Four times 9 requests/s of each replica",
        cells=_overload,
        axis=Axis(
            "replicas",
            "replicas",
            (
                ("goodput_ratio", "goodput over that of 9 requests/s"),
                ("refused", "share refused"),
                ("retry_ratio", "wait that was told over the true one, median"),
                ("retry_within_2", "share within a factor of 2"),
            ),
            line="routing",
        ),
        published="nothing.",
        assumed=_ASSUMED,
    ),
    Figure(
        name="streamserve-table-8",
        title="StreamServe table 8: what each mechanism gains",
        cells=_ablation,
        axis=Axis(
            "workload",
            "",
            (("latency_s", "latency, s"), ("tokens_per_s", "tokens/s"), ("attained", "in time")),
            line="variant",
        ),
        published=(
            "tokens/s, latency in s: full 814, 0.275; without NIXL 765, 0.45; fixed depth 680, "
            "0.88; round robin 520, 1.15; without FlowGuard 490, 1.30; without SpecuStream 310, "
            "2.45; monolithic 290, 3.52; without both 220, 4.10. These are not of the same work "
            "(latency over time per token gives 13 to 20 tokens of output for some)."
        ),
        assumed=(
            "Llama-2-7B with two drafters as fitted to SpecRouter's Table 2, prompts and outputs "
            "of SLOs-Serve's Summarizer, 8 requests/s. No prefix cache: FlowGuard's C is 0. `No "
            "SpecuStream` is no speculation, as their TPOT suggests."
        ),
    ),
)
