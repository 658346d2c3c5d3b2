"""Evaluates a trained family and writes its model card.

`python -m research.train_family.card --data DIR --work DIR`: validation losses, and for every pair
SimScore and acceptance (greedy and at temperature 1) along the target's own texts, by domain.
Acceptance is what the engine would see: with the noise of the request shared, how often does one
model's choice equal the other's?
"""

import argparse
import itertools
import json
import logging
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F
from transformers import LlamaForCausalLM

from modelpool.fast.cpu import computes_in
from processors.noise import gumbel
from research.train_family.corpus import DOMAINS, Corpus, load_corpus
from research.train_family.family import TARGET

logger = logging.getLogger(__name__)

_PROMPT, _NEW, _TEXTS, _WINDOWS, _WINDOW = 64, 96, 12, 48, 256

_HEAD = """# The bundled family

Five Llama-architecture models that share a byte-level BPE tokenizer of 4,096 ids. They exist so
that SpecRouter can be tried and tested at once, offline and on a CPU. They are really trained, and
they are very small: their text looks like its sources and means nothing. Do not use them for
anything else.

- **Generalists** `tiny-1m`, `tiny-3m` and `tiny-8m`, the target. The two smaller ones were
  distilled from the target while it was trained, and after that from its final state, half on text
  and half on the target's own continuations of it.
- **Specialists** `tiny-1m-code` and `tiny-1m-math`: copies of `tiny-1m`, further distilled from the
  target on Python code and on mathematics.

Made by `research/train_family` in {minutes:.0f} minutes of wall-clock time on two CPU cores
that did other work besides. `python -m research.train_family.train --data DIR --work DIR` trains,
`python -m research.train_family.card` with the same options writes this card. `DIR` has the text
below that Python does not bring, `peps_public_domain.rst` and `gsm8k_train.jsonl`.

## Data and licences

| domain | text | licence | training tokens |
|---|---|---|---|
| code | the Python {python} standard library, without its tests | PSF-2.0 | {code:,} |
| prose | 702 Python Enhancement Proposals | public domain | {prose:,} |
| math | GSM8K's training questions with answers | MIT | {math:,} |

One document in 50 was held out for validation. The weights are under Apache-2.0, as the project.

## Tokens seen and validation loss (nats per token, {dtype})
"""


@dataclass(frozen=True)
class Agreement:
    """Of one pair of models on one domain."""

    similarity: float  # 1 - mean total variation at temperature 1
    greedy: float
    sampled: float


def _validation_loss(model: LlamaForCausalLM, tokens: NDArray[np.uint16]) -> float:
    windows = min(_WINDOWS, len(tokens) // (_WINDOW + 1))
    batch = torch.from_numpy(tokens[: windows * (_WINDOW + 1)].astype(np.int64))
    batch = batch.view(windows, _WINDOW + 1)
    logits = model(input_ids=batch[:, :-1], use_cache=False).logits.float()
    return F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten()).item()


def _noise(vocab_size: int) -> Tensor:
    """[texts, new, V]: each text has its own seed."""
    texts = [[gumbel(seed, k, vocab_size) for k in range(_NEW)] for seed in range(_TEXTS)]
    return torch.from_numpy(np.array(texts))


def _own_text(model: LlamaForCausalLM, prompts: Tensor, noise: Tensor) -> Tensor:
    """The model's continuation of each prompt, [texts, prompt + new]. Zero noise is greedy."""
    tokens, cache, fed = prompts, None, prompts
    for position in range(_NEW):
        out = model(input_ids=fed, past_key_values=cache, use_cache=True)
        cache = out.past_key_values
        fed = (out.logits[:, -1].double() + noise[:, position]).argmax(-1, keepdim=True)
        tokens = torch.cat((tokens, fed), dim=1)
    return tokens


def _logits(model: LlamaForCausalLM, texts: Tensor) -> Tensor:
    """[texts, new, V] float64, at the positions that chose the new tokens."""
    logits: Tensor = model(input_ids=texts[:, :-1], use_cache=False).logits[:, _PROMPT - 1 :]
    return logits.double()


def _agreements(
    models: dict[str, LlamaForCausalLM], tokens: NDArray[np.uint16]
) -> dict[tuple[str, str], Agreement]:
    starts = np.linspace(0, len(tokens) - _PROMPT - 1, _TEXTS).astype(int)
    prompts = torch.from_numpy(np.stack([tokens[s : s + _PROMPT].astype(np.int64) for s in starts]))
    target = models[TARGET]
    noise = _noise(target.config.vocab_size)
    sampled_texts = _own_text(target, prompts, noise)
    greedy_texts = _own_text(target, prompts, torch.zeros_like(noise))
    sampled = {name: _logits(model, sampled_texts) for name, model in models.items()}
    greedy = {name: _logits(model, greedy_texts).argmax(-1) for name, model in models.items()}
    probabilities = {name: logits.softmax(-1) for name, logits in sampled.items()}
    choices = {name: (logits + noise).argmax(-1) for name, logits in sampled.items()}
    return {
        (a, b): Agreement(
            1 - (probabilities[a] - probabilities[b]).abs().sum(-1).mean().item() / 2,
            (greedy[a] == greedy[b]).double().mean().item(),
            (choices[a] == choices[b]).double().mean().item(),
        )
        for a, b in itertools.combinations(models, 2)
    }


def _loss_table(
    models: dict[str, LlamaForCausalLM], corpus: Corpus, seen: dict[str, int]
) -> list[str]:
    lines = [
        "| model | parameters | tokens seen | code | prose | math |",
        "|---|---|---|---|---|---|",
    ]
    for name, model in models.items():
        losses = [_validation_loss(model, corpus.validation[domain]) for domain in DOMAINS]
        size = sum(p.numel() for p in model.parameters())
        cells = " | ".join(f"{loss:.2f}" for loss in losses)
        lines.append(f"| {name} | {size / 1e6:.2f}M | {seen[name] / 1e6:.2f}M | {cells} |")
        logger.info("%s", lines[-1])
    return lines


def _agreement_table(models: dict[str, LlamaForCausalLM], corpus: Corpus) -> list[str]:
    lines = [
        "| drafts | verifies | domain | SimScore | acceptance, temperature 1 | greedy |",
        "|---|---|---|---|---|---|",
    ]
    found = {d: _agreements(models, corpus.validation[d]) for d in DOMAINS}
    for a, b in itertools.combinations(models, 2):
        for domain in DOMAINS:
            one = found[domain][a, b]
            lines.append(
                f"| {a} | {b} | {domain} | {one.similarity:.3f} "
                f"| {one.sampled:.3f} | {one.greedy:.3f} |"
            )
    return lines


@torch.inference_mode()
def write_card(data_dir: Path, work_dir: Path, minutes: float, python: str) -> None:
    corpus = load_corpus(data_dir, work_dir)
    folder = work_dir / "models"
    seen = json.loads((folder / "tokens_seen.json").read_text())
    names = sorted(seen, key=lambda name: (int("".join(filter(str.isdigit, name))), name))
    dtype = torch.bfloat16 if computes_in("bfloat16") else torch.float32
    models = {
        n: LlamaForCausalLM.from_pretrained(folder / n, dtype=dtype).train(False) for n in names
    }
    sizes = {domain: len(corpus.train[domain]) for domain in DOMAINS}
    parts = [
        _HEAD.format(
            minutes=minutes, python=python, dtype=str(dtype).removeprefix("torch."), **sizes
        ),
        *_loss_table(models, corpus, seen),
        "\n## Agreement along the target's own texts\n",
        f"{_TEXTS} held-out prompts per domain, {_NEW} tokens each, with shared noise.\n",
        *_agreement_table(models, corpus),
    ]
    (folder / "README.md").write_text("\n".join(parts) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--minutes", type=float, required=True, help="what the training took")
    parser.add_argument("--python", default="3.11", help="version whose library was read")
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    write_card(args.data, args.work, args.minutes, args.python)


if __name__ == "__main__":
    main()
