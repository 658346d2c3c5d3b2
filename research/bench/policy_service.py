"""PolicyService: a router in this process under one named policy after another."""

from research.named_policies import POLICIES
from specrouter.bench.services import OwnService
from specrouter.config.policies import CHAIN_POLICIES
from specrouter.routing.chain_policy import TARGET_ONLY


class PolicyService(OwnService):
    def use(self, policy: str) -> None:
        """One of `POLICIES`, from now on. Raises `ConfigError`."""
        chosen = POLICIES[policy]
        configured = self._router.config.trees.model_dump(exclude_unset=True)
        trees = {**configured, "selection": chosen.selection}
        self._router.set_policy(
            chosen.chains, trees=trees, admission=chosen.admission, **chosen.settings
        )
        # What runs without drafters would teach the others for nothing.
        self._router.instruments.set_learning(CHAIN_POLICIES.find(chosen.chains) is not TARGET_ONLY)
