"""Who takes part: the names that a pool has, and those that were asked for."""

from collections.abc import Sequence
from dataclasses import dataclass

from modelpool import ModelPool
from research.bench.llama_server import LLAMA_SERVER
from specrouter.bench.chains import STATIC, chain_name, own_policies, static_chains
from specrouter.request.params import Chain

SMALLEST, BEST, ADAPTIVE = "smallest", "tuned", "adaptive"


@dataclass(frozen=True, kw_only=True)
class Lineup:
    """Attributes:
    chains: static ones that are measured.
    pairs: chains of two models that `tuned` is the best of; empty where it is not asked for.
    smallest: the chain of that policy, where it is asked for.
    policies: that choose chains, one's own among them.
    """

    has_transformers: bool
    assistants: tuple[str, ...]
    chains: tuple[Chain, ...]
    pairs: tuple[Chain, ...]
    smallest: Chain | None
    policies: tuple[str, ...]


def lineup(
    pool: ModelPool, only: Sequence[str] | None, has_peer: bool, is_recorded: bool = False
) -> Lineup:
    """Target-only takes part whatever is asked for, and so does a peer that is given.

    `is_recorded`: `transformers` does not take part. It cannot replay a recorded text, and its
    assistants would be told the text too.

    Raises `ConfigError` for a name that the pool does not have.
    """
    chains = static_chains(pool)
    pairs = tuple(chain for chain in chains if len(chain) == 2)
    with_models = [chain for chain in pairs if chain[0] in pool.models]
    # To `transformers` a twin is the target once more: it reads the same checkpoint.
    others = [chain[0] for chain in with_models if chain[0] != pool.config.twin]
    assisted = {} if is_recorded else {f"assisted:{name}": name for name in others}
    known = ["off", ADAPTIVE, *assisted, *map(chain_name, chains)]
    known += ["transformers"] * (not is_recorded)
    known += [STATIC] * bool(chains) + ["assisted"] * bool(assisted)
    known += [SMALLEST] * bool(with_models) + [BEST] * bool(pairs)
    known += ["peer", LLAMA_SERVER] * has_peer
    wanted = set(known if only is None else only)
    own = own_policies(sorted(wanted.difference(known)), known)
    return Lineup(
        has_transformers="transformers" in wanted,
        assistants=tuple(m for name, m in assisted.items() if wanted & {name, "assisted"}),
        chains=tuple(c for c in chains if wanted & {chain_name(c), STATIC}),
        pairs=pairs if BEST in wanted else (),
        smallest=with_models[0] if SMALLEST in wanted and with_models else None,
        policies=(*((ADAPTIVE,) if ADAPTIVE in wanted else ()), *own),
    )
