"""The ways in which requests can be served. None of what an `Arrangement` holds may change a token,
but for the target's weights.

Which of them are served is `checks.exact.covering_array`'s part.
"""

import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from modelpool.config import Weights
from research.policies.adaserve import SPECINFER_TREE, AdaServe
from specrouter import SLO, ChainRouter, Speculation
from specrouter.config.policies import CHAIN_POLICIES, NODE_SELECTIONS
from specrouter.cycle import TreeSelector
from specrouter.request.objective import SloLike
from specrouter.slo.node_selection import GLOBAL_GREEDY, NodeSelection
from specrouter.slo.tree_selection import CycleCost
from specrouter.view import RequestTable

Chain = tuple[str, ...]
Override = Literal["off"] | Speculation | None
Trees = tuple[tuple[str, str | int], ...]  # settings of the section `trees`, by name


class _GreedyOfAForm(NodeSelection):
    """The likeliest nodes of SpecInfer's trees."""

    branching = SPECINFER_TREE

    def selector(self, requests: RequestTable, cost: CycleCost, budget_nodes: int) -> TreeSelector:
        return GLOBAL_GREEDY.selector(requests, cost, budget_nodes)


# Shapes and attributes that no built-in or published selection has.
NODE_SELECTIONS.register("greedy-of-a-form", _GreedyOfAForm())
_EASIEST = AdaServe(reshapes=False, order="easiest", root_credit=0.0)
NODE_SELECTIONS.register("adaserve-as-decided", _EASIEST)
SELECTIONS = NODE_SELECTIONS.names  # published ones are among them: research.policies is imported
# What is asked of requests in turn: nothing, what is always given and what never can be, what only
# speculation can give, and a first token. Their number shares no factor with that of overrides.
OBJECTIVES: tuple[SloLike, ...] = (
    None,
    SLO(tpot_ms=1000.0),
    SLO(tpot_ms=1e-3),
    SLO(tpot_ratio=0.8),
    SLO(ttft_ms=50.0),
)


@dataclass(frozen=True)
class Routed:
    """A policy that requests are left to. `nodes` None: it decides, or verifies whole trees."""

    policy: str
    chain: Chain | None = None
    nodes: int | None = None

    def __str__(self) -> str:
        chain = "" if self.chain is None else f" {'>'.join(self.chain)}"
        nodes = "" if self.nodes is None else f" nodes {self.nodes}"
        return f"policy {self.policy}{chain}{nodes}"


@dataclass(frozen=True)
class Mixed:
    """Requests side by side, with these overrides in turn, and a policy for what they leave."""

    overrides: tuple[Override, ...]
    routed: Routed

    def __str__(self) -> str:
        return f"mixed overrides under {self.routed}"


# "adaptive" leaves a request to the router as it is configured; a chain is asked for by name.
Mode = Literal["off", "adaptive"] | Chain | Routed | Mixed


@dataclass(frozen=True, kw_only=True)
class Arrangement:
    """`mode` with `batch` requests in flight; `depth` and `width` of the token trees.

    They are None where the mode ignores them, or is to choose them. `urgent`:
    requests have `OBJECTIVES`. `trees`: see `Trees`; none of them as the router is configured.
    `admission`: who is given rows, and when. `cached`: requests may take over what others, of this
    arrangement or of an earlier one, have read. `weights`: of the router's target, whose texts they
    do change: what is served in int8 is compared with itself.
    """

    mode: Mode
    batch: int
    depth: int | None = None
    width: int | None = None
    urgent: bool = False
    trees: Trees = ()
    admission: str = "fcfs"
    cached: bool = True
    weights: Weights = "auto"

    @property
    def speculation(self) -> Override:
        """The argument that asks the router for it, for the first request."""
        return self.speculation_of(0)

    def speculation_of(self, index: int) -> Override:
        """The argument for the request with this index."""
        if self.mode == "off":
            return "off"
        if isinstance(self.mode, Mixed):
            return self.mode.overrides[index % len(self.mode.overrides)]
        if isinstance(self.mode, tuple):
            return Speculation(self.mode, self.depth, self.width)
        return None

    def slo_of(self, index: int) -> SloLike:
        """The objective of the request with this index."""
        return OBJECTIVES[index % len(OBJECTIVES)] if self.urgent else None

    @property
    def policy(self) -> dict[str, Any] | None:
        """What `ChainRouter.set_policy` is given; None leaves the router as it is configured."""
        routed = self.mode.routed if isinstance(self.mode, Mixed) else self.mode
        if not isinstance(routed, Routed):
            return None
        return {
            **vars(routed),
            "depth": self.depth,
            "width": self.width,
            "trees": dict(self.trees) or None,
        }

    @contextlib.contextmanager
    def routing(self, router: ChainRouter) -> Iterator[None]:
        """The router under this policy; outside no request may run."""
        configured = router.config.scheduler.model_dump()
        router.set_policy(**(self.policy or configured), admission=self.admission)
        try:
            yield
        finally:
            router.set_policy(**configured)

    def __str__(self) -> str:
        mode = ">".join(self.mode) if isinstance(self.mode, tuple) else str(self.mode)
        settings = ("depth", "width")
        given = ((name, getattr(self, name)) for name in settings)
        settings_given = [(name, value) for name, value in given if value is not None]
        shape = "".join(f" {name} {value}" for name, value in (*settings_given, *self.trees))
        objectives = " with objectives" if self.urgent else ""
        cache = "" if self.cached else " without the prefix cache"
        weights = "" if self.weights == "auto" else f" weights {self.weights}"
        asked = f"{mode} batch {self.batch}{shape}{objectives} admission {self.admission}"
        return f"{asked}{cache}{weights}"


def chains(names: Sequence[str], target: str, size: Callable[[str], int]) -> list[Chain]:
    """Every chain of two or three models that ends in the target and strictly grows in size.

    A drafter need not be smaller than the target, only smaller than what stands between them. One
    without weights is smaller than all, so it only ever stands first.
    """
    drafters = [name for name in names if name != target]
    pairs: list[Chain] = [(name, target) for name in drafters]
    triples: list[Chain] = [
        (first, second, target)
        for first, second in itertools.combinations(drafters, 2)
        if size(first) < size(second)
    ]
    return pairs + triples


def modes_of(router: ChainRouter) -> list[Mode]:
    """Off, every chain of the router's pool, and the scheduler's own choice."""
    pool = router.pool
    return ["off", *chains(pool.names, pool.target, pool.parameter_count), "adaptive"]


def policies_of(router: ChainRouter) -> list[Mode]:
    """Every policy, and all that a request may ask for, side by side, under policies that treat it
    differently."""
    longest = longest_chain(router)
    with_weights = tuple(name for name in longest if name in router.pool.models)
    overrides: tuple[Override, ...] = (
        None,
        "off",
        Speculation(longest[-2:], depth=4, width=4),
        Speculation(depth=3),
        Speculation(with_weights, depth=3, width=2),
        Speculation((*longest[:1], longest[-1]), depth=7),
        Speculation(width=2),
        None,
        Speculation(with_weights, depth=1, width=1),
        Speculation(longest, depth=5, width=3),
        Speculation(longest[-1:]),
    )
    return [
        *(Routed(name) for name in CHAIN_POLICIES.names if name != "static"),
        Routed("static", longest[-2:]),
        Routed("static", with_weights),
        Routed("static", with_weights, nodes=3),
        *(Mixed(overrides, Routed(name)) for name in ("adaptive", "paper")),
    ]


def longest_chain(router: ChainRouter) -> Chain:
    """As many models as a chain can have that strictly grows."""
    pool = router.pool
    chain: Chain = ()
    drafters = (name for name in pool.names if name != pool.target)
    for name in sorted(drafters, key=pool.parameter_count):
        if not chain or pool.parameter_count(name) > pool.parameter_count(chain[-1]):
            chain = (*chain, name)
    return (*chain, pool.target)
