"""What the target goes on with: windows of text, then the target's own continuation of it.

Contract: `load_own_text(target, corpus, work_dir)` returns token arrays per domain, as the corpus
has them, made of windows of `WINDOW` tokens: `PROMPT` of the training text and the rest sampled at
temperature 1. They are made once and kept under `work_dir`.
"""

import copy
import logging
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import LlamaForCausalLM, StaticCache

from modelpool.fast.cpu import computes_in
from research.train_family.corpus import DOMAINS, Corpus

logger = logging.getLogger(__name__)

WINDOW, PROMPT = 385, 97
_ROWS, _BATCHES = 256, 4  # per domain: 1,024 windows, 295,000 tokens of the target's own


@torch.inference_mode()
def _continue(target: LlamaForCausalLM, prompts: Tensor) -> Tensor:
    """[rows, PROMPT] -> [rows, WINDOW], sampled at temperature 1."""
    cache = StaticCache(config=target.config, max_cache_len=WINDOW)
    tokens, fed = prompts, prompts
    while tokens.shape[1] < WINDOW:
        logits = target(
            input_ids=fed, past_key_values=cache, use_cache=True, logits_to_keep=1
        ).logits
        fed = torch.multinomial(logits[:, -1].float().softmax(-1), 1)
        tokens = torch.cat((tokens, fed), dim=1)
    return tokens


def load_own_text(
    target: LlamaForCausalLM, corpus: Corpus, work_dir: Path
) -> dict[str, NDArray[np.uint16]]:
    """[n] uint16 per domain; minutes of work the first time."""
    kept = work_dir / "own_text.npz"
    if not kept.exists():
        served: LlamaForCausalLM = copy.deepcopy(target).bfloat16()  # as the family is written
        if target.device.type == "cpu" and not computes_in("bfloat16"):
            torch.nn.Module.to(served, torch.float32)  # in place
        rng = np.random.default_rng(0)
        torch.manual_seed(0)
        own: dict[str, NDArray[np.uint16]] = {}
        for domain in DOMAINS:
            text = corpus.train[domain]
            windows = []
            for _ in range(_BATCHES):
                starts = rng.integers(0, len(text) - PROMPT, size=_ROWS)
                prompts = np.stack([text[s : s + PROMPT].astype(np.int64) for s in starts])
                tokens = _continue(served, torch.from_numpy(prompts).to(target.device))
                windows.append(tokens.cpu().numpy().astype(np.uint16))
                logger.info("own text, %s: %d windows", domain, len(windows) * _ROWS)
            own[domain] = np.concatenate(windows).reshape(-1)
        np.savez(kept, **own)  # type: ignore[arg-type]
    loaded = np.load(kept)
    return {domain: loaded[domain] for domain in DOMAINS}
