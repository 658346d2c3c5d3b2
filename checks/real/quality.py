"""How far the distributions of the next token lie from those of a file's weights in float32.

    python -m checks.real.quality FILE [--weights int8] [--texts 18]
        [--llama-server PATH] [--llama-file FILE]

Texts are the beginnings of this project's own documents and sources. At each of their tokens the 20
likeliest next ones and the rest are compared with those of `transformers`, whose weights are the
file's, dequantised to float32: by the Kullback-Leibler divergence, and by how often the likeliest
token is the same. With a llama-server both are compared at the same places, by the ratio of the
means and the bootstrap's interval of 95%. FILE may be a folder of safetensors, for `--weights`;
llama-server then reads `--llama-file`, of the same weights.
"""

import argparse
import json
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from checks.exact.report import conditions
from checks.real.peer import llama_command, posted, served
from specrouter import ChainRouter, SamplingParams
from specrouter.config import RouterConfig

ROOT = Path(__file__).parents[2]
_TEXT_FILES = ("docs/*.md", "specrouter/*.py", "CONTRIBUTING.md")
_MOST_TOKENS, _TOP = 100, 20
_SKIPPED = 8  # places at a text's beginning
_DRAWS = 2000  # of the bootstrap
_PORT = 9311

Likeliest = Mapping[int, float]  # log-probabilities by token


@dataclass(frozen=True)
class Compared:
    """One place. `divergence`: KL from float32."""

    divergence: float
    is_same: bool


def main() -> int:
    parser = argparse.ArgumentParser(prog="checks.real.quality", description=__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("--weights", default="auto")
    parser.add_argument("--texts", type=int, default=18)
    parser.add_argument("--llama-server", type=Path, metavar="PATH")
    parser.add_argument("--llama-file", type=Path, metavar="FILE")
    arguments = parser.parse_args()
    file: Path = arguments.file
    with ChainRouter(_config(file, arguments.weights)) as router:
        assert router.tokenizer is not None
        encode = router.tokenizer.encode
        texts = [encode(one)[:_MOST_TOKENS] for one in _texts(arguments.texts)]
        params = SamplingParams(max_new_tokens=1, prompt_logprobs=_TOP)
        own = [
            [dict(place.top) for place in output.prompt_logprobs or () if place is not None]
            for output in router.generate(texts, params)
        ]
    peer = None
    if arguments.llama_server is not None:
        read = arguments.llama_file or file
        command = llama_command(arguments.llama_server, read, _PORT, "-c", "4096", "-np", "1")
        with served(command, _PORT) as peers:
            peer = [[_asked(peers.url, text[:end]) for end in _places(text)] for text in texts]
    wanted = _reference(file, texts)
    report: dict[str, Any] = {"file": file.name, "weights": arguments.weights, **conditions()}
    found = {"own": own} | ({} if peer is None else {"llama.cpp": peer})
    by = {name: _compared(wanted, each, texts) for name, each in found.items()}
    for name, each in by.items():
        mean = float(np.mean([one.divergence for one in each]))
        same = sum(one.is_same for one in each)
        report[name] = {"kl": mean, "same": same, "places": len(each)}
    if peer is not None:
        report["ratio"] = _ratio(by["own"], by["llama.cpp"])
    print(json.dumps(report, indent=1))
    return 0


def _config(file: Path, weights: str) -> RouterConfig:
    member = {"name": "m", "source": str(file), "device": "cpu", "weights": weights}
    return RouterConfig.model_validate({"pool": {"models": [member], "target": "m"}})


def _texts(count: int) -> Iterator[str]:
    files = sorted(one for pattern in _TEXT_FILES for one in ROOT.glob(pattern))
    for file in files[:count]:
        yield file.read_text(encoding="utf-8")[: 8 * _MOST_TOKENS]


def _places(text: Sequence[int]) -> range:
    """How many tokens come before each place."""
    return range(_SKIPPED, len(text))


def _reference(file: Path, texts: Sequence[Sequence[int]]) -> list[torch.Tensor]:
    """Log-probabilities [places, vocabulary] of each text."""
    source = {"gguf_file": file.name} if file.is_file() else {}
    folder = file.parent if file.is_file() else file
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **source)
    with torch.inference_mode():
        logits = (model(torch.tensor([text])).logits[0, _SKIPPED - 1 : -1] for text in texts)
        return [torch.log_softmax(one.double(), -1).float() for one in logits]


def _compared(
    wanted: Sequence[torch.Tensor],
    found: Sequence[Sequence[Likeliest]],
    texts: Sequence[Sequence[int]],
) -> list[Compared]:
    places = []
    for exact, text, answers in zip(wanted, texts, found, strict=True):
        there = len(_places(text))
        for row, likeliest in zip(exact, answers[-there:], strict=True):
            is_same = max(likeliest, key=likeliest.__getitem__) == int(row.argmax())
            places.append(Compared(_divergence(row, likeliest), is_same))
    return places


def _divergence(exact: torch.Tensor, found: Likeliest) -> float:
    """Over the tokens of `found`, and all others together."""
    total, left, other = 0.0, 1.0, 1.0
    for token, value in found.items():
        share = math.exp(float(exact[token]))
        total += share * (float(exact[token]) - value)
        left, other = left - share, other - math.exp(value)
    if left > 1e-9 and other > 1e-9:
        total += left * math.log(left / other)
    return total


def _ratio(own: Sequence[Compared], peer: Sequence[Compared]) -> dict[str, float]:
    a, b = (np.array([one.divergence for one in each]) for each in (own, peer))
    draws = np.random.default_rng(0).integers(0, len(a), (_DRAWS, len(a)))
    low, high = np.quantile(a[draws].mean(1) / b[draws].mean(1), (0.025, 0.975))
    return {"of means": float(a.mean() / b.mean()), "low": float(low), "high": float(high)}


def _asked(url: str, prompt: Sequence[int]) -> Likeliest:
    body = {"prompt": list(prompt), "n_predict": 1, "temperature": 0, "n_probs": _TOP}
    [place] = posted(f"{url}/completion", body)["completion_probabilities"]
    return {one["id"]: one["logprob"] for one in place["top_logprobs"]}


if __name__ == "__main__":
    sys.exit(main())
