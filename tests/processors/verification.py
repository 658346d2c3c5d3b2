"""Verification of trees by a tiny model."""

import numpy as np
import torch

from processors.draft import DraftProcessor
from processors.drafts import DraftRequest, DraftResult
from processors.pack import FedTree
from processors.rollback import RollbackProcessor
from processors.token_tree import Ints, TokenTree
from processors.verify import PrefillChunks, VerifyProcessor, VerifyRequest
from processors.verify_result import VerifyResult
from tests.processors.tiny import Bench
from tests.processors.trees import build, line, nodes_of, path


def path_tree(nodes: dict[int, list[int]]) -> TokenTree:
    return build({row: line(*tokens) for row, tokens in nodes.items()})


def chunks_of(prefill: dict[int, int] | None) -> PrefillChunks:
    chunks = prefill or {}
    rows, counts = (np.array(list(part), dtype=np.int64) for part in (chunks, chunks.values()))
    return PrefillChunks(rows, counts)


def verify(
    bench: Bench, tree: TokenTree, prefill: dict[int, int] | None = None, rescore: bool = False
) -> VerifyResult:
    positions = bench.output_positions(tree.rows)
    request = VerifyRequest(
        tree=tree, output_positions=positions, rescore=rescore, chunks=chunks_of(prefill)
    )
    return VerifyProcessor(bench.sampler).verify(bench.active, request)


def verify_path(
    bench: Bench, nodes: dict[int, list[int]], prefill: dict[int, int] | None = None
) -> VerifyResult:
    return verify(bench, path_tree(nodes), prefill)


def forget(bench: Bench, rows: list[int], bases: Ints, fed: FedTree | None = None) -> None:
    which = np.array(rows)
    rollback = RollbackProcessor()
    kept = rollback.kept(bench.manager, which, bases[which], [fed] if fed else [])
    rollback.rollback(bench.state, bench.manager, which, bases[which], kept)
    bench.manager.check_integrity()


def draft(
    bench: Bench,
    depths: dict[int, int],
    width: int = 1,
    branching: tuple[int, ...] | None = None,
) -> DraftResult:
    rows, deep = np.array([*depths]), np.array([*depths.values()])
    request = DraftRequest(
        rows=rows,
        output_positions=bench.output_positions(rows),
        depths=deep,
        width=width,
        branching=branching,
    )
    return DraftProcessor(bench.sampler).draft(bench.active, request)


def assert_logits(bench: Bench, result: VerifyResult) -> None:
    """After the root and after every node they are the ordinary forward's."""
    seen = []
    for index, (row, nodes) in enumerate(nodes_of(result.tree).items()):
        for place in range(-1, len(nodes)):
            at = int(result.places[index, place + 1])
            wanted = bench.logits_after(row, path(nodes, place))
            torch.testing.assert_close(result.logits[at], wanted, rtol=0, atol=1e-9)
            seen.append(at)
        assert np.all(result.places[index, len(nodes) + 1 :] == -1)
    assert seen == list(range(len(result.logits)))
