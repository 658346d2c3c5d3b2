"""What branching brings at temperature 1: tokens per target pass, and where the choice is found.

For every drafter of the pool: committed tokens per pass of the target with trees of width 1 and 3;
and how often the target's choice is among the drafter's best 1 and 3 tokens, by perturbed and by
raw logits, along the target's own texts. Passes if width 3 commits more than width 1 with every
drafter, and the best 3 by perturbed logits hold the choice 1.5 times as often as by raw ones.
"""

import sys
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from checks.exact.arguments import Options, load_token_prompts, open_router, parse
from checks.exact.report import Progress, finish
from processors.noise import gumbel
from specrouter import ChainRouter, RequestOutput, SamplingParams, Speculation

DEPTH = 4
WIDTHS = (1, 3)
LEAST_GAIN = 1.5  # of perturbed over raw logits, best 3


def main(arguments: list[str] | None = None) -> int:
    options = parse(__doc__, arguments)
    started = time.monotonic()
    figures: dict[str, Any] = {}
    with open_router(options.config, "float32", 16) as router:
        prompts = load_token_prompts(router, options)
        drafters = [name for name in router.pool.names if name != router.pool.target]
        progress = Progress("breadth", len(drafters) * len(WIDTHS))
        for name in drafters:
            chain = (name, router.pool.target)
            figures[name] = {}
            for width in WIDTHS:
                outputs = _serve(router, prompts, options, Speculation(chain, DEPTH, width))
                figures[name][f"tokens_per_pass_width_{width}"] = _tokens_per_pass(outputs)
                progress(name)
            if name in router.pool.models:
                figures[name] |= _rates(router, name, prompts, outputs)
    passed = all(
        one["tokens_per_pass_width_3"] > one["tokens_per_pass_width_1"]
        and one.get("perturbed_top_3", LEAST_GAIN) >= LEAST_GAIN * one.get("raw_top_3", 1.0)
        for one in figures.values()
    )
    return finish("breadth", passed, started, figures)


def _serve(
    router: ChainRouter,
    prompts: Sequence[tuple[int, ...]],
    options: Options,
    speculation: Speculation,
) -> list[RequestOutput]:
    params = [
        SamplingParams(
            max_new_tokens=options.new_tokens, temperature=1.0, seed=index, ignore_eos=True
        )
        for index in range(len(prompts))
    ]
    return router.generate(list(prompts), params, speculation)


def _tokens_per_pass(outputs: Sequence[RequestOutput]) -> float:
    tokens = sum(output.metrics.output_tokens for output in outputs)
    return tokens / sum(output.metrics.cycles for output in outputs)


@torch.inference_mode()
def _rates(
    router: ChainRouter,
    name: str,
    prompts: Sequence[tuple[int, ...]],
    outputs: Sequence[RequestOutput],
) -> dict[str, float]:
    """How often a drafter's best tokens hold the target's choice."""
    model = AutoModelForCausalLM.from_pretrained(router.pool.path(name), dtype=torch.float32)
    hits = {f"{kind}_top_{width}": 0 for kind in ("perturbed", "raw") for width in WIDTHS}
    count = 0
    for index, (prompt, output) in enumerate(zip(prompts, outputs, strict=True)):
        text = torch.tensor([[*prompt, *output.token_ids]])
        logits = model(text).logits[0, len(prompt) - 1 : -1, : router.pool.vocab_size].double()
        noise = torch.stack(
            [
                torch.from_numpy(gumbel(index, position, logits.shape[1]))
                for position in range(len(output.token_ids))
            ]
        )
        chosen = torch.tensor(output.token_ids)
        count += len(chosen)
        for kind, scores in (("perturbed", logits + noise), ("raw", logits)):
            for width in WIDTHS:
                hits[f"{kind}_top_{width}"] += _held(scores, chosen, width)
    return {key: value / count for key, value in hits.items()}


def _held(scores: Tensor, chosen: Tensor, width: int) -> int:
    return int((scores.topk(width, dim=1).indices == chosen.unsqueeze(1)).any(dim=1).sum())


if __name__ == "__main__":
    sys.exit(main())
