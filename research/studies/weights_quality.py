"""What quantised weights cost in quality: the target of a configuration beside itself.

    python -m research.studies.weights_quality [--weights int4] [--config FILE] [--texts FILE ...]

Texts are cut into windows of `--length` tokens, and each is read by the target as it is configured
with plain weights and with those of `--weights`. Shown are the loss of both in nats per token, how
far their distributions are from one another, and how often they choose the same token: the
likeliest one, and at temperature 1 with the noise that both share, which is the acceptance of
drafts that one makes for the other. By default the texts are this repository's own. The last line
is one JSON document.
"""

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from modelpool import ModelPool
from modelpool.checkpoint.footprint import QUANTISED_WEIGHTS
from modelpool.config import ModelConfig, PoolConfig, Weights
from modelpool.packed_model import PackedModel
from modelpool.probe import ProbeView
from processors.noise import gumbel
from specrouter.cli.arguments import default_config
from specrouter.config import RouterConfig

_ROOT = Path(__file__).parents[2]


@dataclass(frozen=True, kw_only=True)
class Quality:
    """Means over `tokens` predicted ones.

    Attributes:
        plain_loss, quantised_loss: nats per token of the text.
        kl: from the plain model's distribution to the other's, nats.
        total_variation: between the two.
        same_greedy: share of positions at which both have the same likeliest token.
        same_sampled: the same with shared noise at temperature 1: acceptance.
    """

    tokens: int
    plain_loss: float
    quantised_loss: float
    kl: float
    total_variation: float
    same_greedy: float
    same_sampled: float

    @property
    def loss_ratio(self) -> float:
        return self.quantised_loss / self.plain_loss


def main(argv: Sequence[str] | None = None) -> None:
    options = _parser().parse_args(argv)
    pool = RouterConfig.load(options.config).pool
    target = next(model for model in pool.models if model.name == pool.target)
    plain, ids = _loaded(target, "auto", options.texts or _own_texts())
    small, _ = _loaded(target, options.weights, [])
    windows = list(_windows(ids, options.length, options.windows))
    if not windows:
        raise SystemExit(f"the texts are shorter than a window of {options.length} tokens")
    found = mean([compare(plain, small, window) for window in windows])
    change = 100 * (found.loss_ratio - 1)
    print(
        f"{target.name}, {found.tokens} tokens: loss {found.plain_loss:.4f} plain, "
        f"{found.quantised_loss:.4f} in {options.weights} ({change:+.2f}%)"
    )
    print(
        f"KL {found.kl:.5f}, TV {found.total_variation:.4f}; the same token greedily in "
        f"{100 * found.same_greedy:.1f}%, sampled in {100 * found.same_sampled:.1f}%"
    )
    told = {"target": target.name, "weights": options.weights, **asdict(found)}
    print(json.dumps({**told, "loss_ratio": found.loss_ratio}))


@torch.inference_mode()
def compare(plain: PackedModel, small: PackedModel, window: Tensor) -> Quality:
    """`window` [T] int64: each token but the first is predicted."""
    logits = [_logits(model, window[:-1]) for model in (plain, small)]
    logs = [each.log_softmax(-1) for each in logits]
    nexts = window[1:].unsqueeze(1)
    drawn_noise = [gumbel(0, position, plain.vocab_size) for position in range(len(nexts))]
    noise = torch.from_numpy(np.stack(drawn_noise))
    best = [each.argmax(-1) for each in logits]
    drawn = [(each + noise).argmax(-1) for each in logits]
    return Quality(
        tokens=len(nexts),
        plain_loss=-float(logs[0].gather(1, nexts).mean()),
        quantised_loss=-float(logs[1].gather(1, nexts).mean()),
        kl=float((logs[0].exp() * (logs[0] - logs[1])).sum(-1).mean()),
        total_variation=float((logs[0].exp() - logs[1].exp()).abs().sum(-1).mean() / 2),
        same_greedy=float((best[0] == best[1]).double().mean()),
        same_sampled=float((drawn[0] == drawn[1]).double().mean()),
    )


def mean(parts: Sequence[Quality]) -> Quality:
    """Of windows that are equally long."""
    names = [field.name for field in fields(Quality) if field.name != "tokens"]
    means = {name: sum(getattr(part, name) for part in parts) / len(parts) for name in names}
    return Quality(tokens=sum(part.tokens for part in parts), **means)


def _logits(model: PackedModel, tokens: Tensor) -> Tensor:
    """[T, V] float64."""
    view = ProbeView(model.device, len(tokens), model.kv_layers)
    view.begin(0, len(tokens))
    positions = torch.arange(len(tokens))
    return model.forward(tokens, positions, view, positions).logits.double()


def _loaded(
    target: ModelConfig, weights: Weights, texts: Sequence[Path]
) -> tuple[PackedModel, list[int]]:
    """The target alone, and the ids of the texts."""
    member = target.model_copy(update={"weights": weights, "device": "cpu"})
    pool = ModelPool(PoolConfig(target=target.name, models=(member,)))
    written = "\n\n".join(path.read_text(encoding="utf-8", errors="replace") for path in texts)
    return pool.get(target.name), list(pool.tokenizer(written, verbose=False)["input_ids"])


def _windows(ids: Sequence[int], length: int, most: int) -> Iterator[Tensor]:
    """Spread evenly over the texts."""
    count = len(ids) // length
    step = max(1, count // most)
    for start in range(0, count, step)[:most]:
        yield torch.tensor(ids[start * length : (start + 1) * length])


def _own_texts() -> list[Path]:
    return sorted([*_ROOT.glob("*.md"), *(_ROOT / "docs").glob("*.md"), *_ROOT.glob("*/*.py")])


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--config", type=Path, default=default_config())
    parser.add_argument("--weights", choices=QUANTISED_WEIGHTS, default="int8")
    parser.add_argument("--texts", type=Path, nargs="+", help="files of plain text")
    parser.add_argument("--windows", type=int, default=64, help="at most")
    parser.add_argument("--length", type=int, default=256, help="tokens of a window")
    return parser


if __name__ == "__main__":
    main()
