"""RejectionSampling: Leviathan's rule, with noise of its own at every level of a chain.

Drafts are paths, of tokens drawn from their drafter's distribution. A verifier accepts or refuses
them one by one, and draws one token more (`processors.leviathan` has the rule and why chains of any
length stay exact). No node may be left out because of its token, so drafts are neither pruned nor
selected from.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from processors.drafts import DraftRequest, DraftResult
from processors.grammar import TokenGrammar
from processors.leviathan import accepted_lengths, emit
from processors.logits import on_device, parts
from processors.ngram import NoiseLookup
from processors.sampler import Sampler
from processors.token_tree import ROOT, Bools, Ints, TokenTree
from processors.verify_result import VerifierForward, VerifyResult


class RejectionSampling:
    """Implements `AcceptanceRule`."""

    shares_noise = False
    verifies_whole_drafts = True

    def noise_purpose(self, level: int) -> int:
        return level + 1  # 0 is the noise that all models share

    def shaped(self, request: DraftRequest) -> DraftRequest:
        """Of width 1."""
        return replace(request, width=1, branching=None)

    def noise_lookup(self, sampler: Sampler) -> NoiseLookup:
        """None: what is drafted without chance is accepted or refused by the verifier's alone."""
        return _no_noise

    def legal(self, tree: TokenTree, grammars: Mapping[int, TokenGrammar]) -> TokenTree:
        """All of it: a verifier refuses what its grammar does not allow by its own distribution."""
        return tree

    def accept(
        self,
        sampler: Sampler,
        forward: VerifierForward,
        drafts: Sequence[DraftResult],
        level: int,
        rescore: bool,
    ) -> VerifyResult:
        """Waits for the device a few times. Log-probabilities are not found: a draft needs none."""
        tree, places = forward.tree, forward.places
        paths = _DraftedPaths(sampler, forward, drafts)
        purpose = self.noise_purpose(level)
        accepted, is_told = paths.accepted(purpose)
        emitted, finite_there = paths.emitted(accepted, purpose)
        finite, broken = np.ones(places.shape, np.bool_), np.zeros(places.shape, np.bool_)
        last = np.arange(len(tree.rows)), accepted  # a node is accepted by numbers only
        finite[last] = finite_there & is_told
        broken[places >= 0] = forward.logits.amax(dim=1).isnan().cpu().numpy()
        choices = np.zeros(places.shape, dtype=np.int64)
        choices[:, :-1] = tree.tokens
        choices[last] = emitted
        return VerifyResult(
            **vars(forward),
            accepted=np.arange(tree.tokens.shape[1]) < accepted[:, None],
            choices=choices,
            choice_log_probs=np.where(finite, 0.0, -np.inf),  # what was not drawn is not handed on
            node_log_probs=np.zeros(tree.tokens.shape),
            finite=finite,
            broken=broken,
        )

    def next_draft(
        self, result: VerifyResult, *, hard_rejection: bool, is_path: bool
    ) -> DraftResult:
        """The accepted path and the token drawn after it: without that token the next level would
        take accepted ones for draws from the verifier's distribution, which they are not."""
        return result.draft(hard_rejection=False, is_path=True)


def _no_noise(row: int, position: int, ids: Ints) -> NDArray[np.float64]:
    return np.zeros(len(ids))


class _DraftedPaths:
    """Drafts of width 1 of many requests. `accepted`, then `emitted`, each with one wait for the
    device. Distributions are made piece by piece and never kept: first those of all nodes, each for
    what it says of the node's token, then those at the places where rows stop, for which alone
    noise is drawn.
    """

    def __init__(
        self, sampler: Sampler, forward: VerifierForward, drafts: Sequence[DraftResult]
    ) -> None:
        tree, places = forward.tree, forward.places
        self._sampler = sampler
        self._contexts = forward.contexts
        self._logits = forward.logits
        self._sizes = tree.sizes
        self._drafts = drafts
        # Of each node, row after row: where it was drawn, by whom, and from which of their logits.
        self._tokens = tree.tokens[tree.real]
        self._before = np.take_along_axis(places, tree.parents + 1, axis=1)[tree.real]
        self._drafter = np.zeros_like(self._before)
        self._source = np.zeros_like(self._before)
        first = np.cumsum(tree.sizes) - tree.sizes
        for number, draft in enumerate(drafts):
            own = draft.tree
            start = first[np.searchsorted(tree.rows, own.rows)][:, None]
            nodes = (start + np.arange(own.tokens.shape[1]))[own.real]
            origin = np.take_along_axis(own.origins, np.maximum(own.parents, 0), axis=1)
            origin = np.where(own.parents == ROOT, ROOT, origin)
            self._drafter[nodes] = number
            self._source[nodes] = np.take_along_axis(draft.places, origin + 1, axis=1)[own.real]

    def accepted(self, purpose: int) -> tuple[Ints, Bools]:
        """[B] how many nodes, and whether numbers told it. Waits for the device once."""
        p, q = [], []
        for part in parts(len(self._tokens), self._logits):
            nodes = np.arange(part.start, part.stop)
            tokens = on_device(self._tokens[nodes], self._logits.device).unsqueeze(1)
            p.append(self._verifiers(self._before[nodes]).gather(1, tokens))
            q.append(self._drafters(nodes).gather(1, tokens))
        values = torch.cat((*p, *q)).cpu().numpy().reshape(2, -1)  # the one wait
        uniforms = self._sampler.uniforms(self._contexts, purpose)[self._before]
        return accepted_lengths(values[0], values[1], self._sizes, uniforms)

    def emitted(self, accepted: Ints, purpose: int) -> tuple[Ints, Bools]:
        """[B] the token after the accepted nodes, and whether there is one. Waits once."""
        stops = np.cumsum(self._sizes + 1) - (self._sizes + 1) + accepted
        refused = np.cumsum(self._sizes) - self._sizes + accepted
        was_refused = accepted < self._sizes
        found = []
        for part in parts(len(stops), self._logits):
            p = self._verifiers(stops[part])
            q = torch.zeros_like(p)
            which = np.flatnonzero(was_refused[part])
            q[on_device(which, p.device)] = self._drafters(refused[part][which])
            noise = self._sampler.noise(self._contexts.take(stops[part]), purpose, like=p)
            ids, scores = emit(p, q, noise)
            found.append(torch.stack((ids, scores.isfinite())))
        both = torch.cat(found, dim=1).cpu().numpy()  # the one wait
        return both[0], both[1].astype(np.bool_)

    def _verifiers(self, index: Ints) -> Tensor:
        """[k, V] the verifier's distributions at some of the contexts."""
        logits = self._logits.index_select(0, on_device(index, self._logits.device))
        return self._sampler.distribution(logits, self._contexts.take(index))

    def _drafters(self, nodes: Ints) -> Tensor:
        """[k, V] the distributions that some of the nodes were drawn from."""
        device = self._logits.device
        shape = (len(nodes), self._logits.shape[1])
        q = torch.zeros(shape, dtype=torch.float64, device=device)
        for number, draft in enumerate(self._drafts):
            which = np.flatnonzero(self._drafter[nodes] == number)
            if not len(which):
                continue
            index, own = on_device(which, device), nodes[which]
            if not len(draft.logits):  # drawn without chance
                q[index, on_device(self._tokens[own], device)] = 1.0
                continue
            source = on_device(self._source[own], draft.logits.device)
            logits = draft.logits.index_select(0, source).to(device)
            contexts = self._contexts.take(self._before[own])
            if not draft.is_masked:
                contexts = replace(contexts, masks=None)
            q[index] = self._sampler.distribution(logits, contexts)
        return q
