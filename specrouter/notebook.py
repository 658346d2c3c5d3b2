"""Display of texts in notebooks: each token in the colour of the model that proposed it.

Contract: tokens are escaped, and distinct without colours: tokens proposed by a drafter are
underlined, and the title of a token names its model and its cycle.
"""

import html
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import comb, nan
from statistics import median

from specrouter.request.output import RequestOutput

# Background colours of drafters, pale under dark text; the target's own tokens have none.
_COLOURS = ("#fde68a", "#bfdbfe", "#bbf7d0", "#fbcfe8", "#ddd6fe", "#fed7aa", "#a5f3fc", "#e5e7eb")
PAIRS = (8, 16, 32)  # of a comparison; after each of these numbers it may end
_MISSES = 1 / 128  # largest probability that the interval misses the median
_TEXT = "white-space:pre-wrap;font-family:monospace;line-height:1.6"
_NOTE = "color:gray;font-size:smaller"


def speed(output: RequestOutput) -> str:
    """Return the length and speed of an output in one line.

    Example: `64 tokens (length) | 310.2 tokens/s | ttft 41 ms | acceptance length 2.78`.
    """
    metrics, rate = output.metrics, output.metrics.tokens_per_s
    parts = [f"{metrics.output_tokens} tokens ({output.finish_reason})"]
    if rate is not None:
        parts += [f"{rate:.1f} tokens/s", f"ttft {metrics.ttft_ms:.0f} ms"]
    if metrics.cycles:
        parts.append(f"acceptance length {metrics.acceptance_length:.2f}")
    return " | ".join(parts)


def figures(output: RequestOutput) -> str:
    """Return `speed`, the shares of chains, whether the objective was attained, and the seed.

    All are in one line, the most used chain first.
    """
    metrics, parts = output.metrics, [speed(output)]
    if metrics.cycles:
        chains = Counter(metrics.chains).most_common()
        shares = (f"{'>'.join(chain)} {count / metrics.cycles:.0%}" for chain, count in chains)
        parts.append(", ".join(shares))
    if metrics.attained is not None:
        parts.append("objective attained" if metrics.attained else "objective missed")
    return " | ".join([*parts, f"seed {output.seed}"])


@dataclass(frozen=True, kw_only=True, repr=False)
class Text(RequestOutput):
    """An output for display in a notebook (see `RequestOutput`), requested with its `drafts`."""

    @property
    def tokens_per_s(self) -> float | None:
        return self.metrics.tokens_per_s

    @property
    def tokens(self) -> Iterator[tuple[str, str, int]]:
        """The text of each token, the model that proposed it, and its cycle."""
        for draft in self.drafts or ():
            for text, model in zip(draft.texts, draft.proposed_by, strict=True):
                yield text, model, draft.cycle

    @property
    def figures(self) -> str:
        return figures(self) if self.error is None else f"{figures(self)} | {self.error}"

    def _repr_html_(self) -> str:
        tokens = list(self.tokens)
        drafters = Counter(model for _, model, _ in tokens)
        target = self.drafts[0].chain[-1] if self.drafts else ""
        own = drafters.pop(target, 0)
        colours = {name: _COLOURS[at % len(_COLOURS)] for at, name in enumerate(sorted(drafters))}
        spans = "".join(_span(*token, colours) for token in tokens)
        counts = [_span(f"{name} {count}", name, 0, colours) for name, count in drafters.items()]
        legend = ", ".join([*counts, html.escape(f"{target} {own}")] if target else counts)
        note = f"{html.escape(self.figures)}<br>proposed by: {legend}"
        return f'<div style="{_TEXT}">{spans}</div><div style="{_NOTE}">{note}</div>'


class Texts(list[Text]):
    """A list of texts, displayed one below the other."""

    def _repr_html_(self) -> str:
        return "<hr>".join(text._repr_html_() for text in self)


@dataclass(frozen=True)
class Comparison:
    """The same request served `routed` and by the target `alone`, several times in turns.

    Attributes:
        routed, alone: the last answers.
        ratios: tokens/s of routed over alone, for each pair of consecutive runs.
    """

    routed: Text
    alone: Text
    ratios: tuple[float, ...] = ()

    @property
    def first_difference(self) -> int | None:
        """Index of the first token that differs, from 0; None if the texts are equal."""
        routed, alone = self.routed.token_ids, self.alone.token_ids
        shorter = min(len(routed), len(alone))
        at = next((at for at in range(shorter) if routed[at] != alone[at]), shorter)
        return None if routed == alone else at

    @property
    def equal(self) -> bool:
        return self.first_difference is None

    @property
    def speedup(self) -> float | None:
        """Median over the pairs of tokens/s routed over alone; one request is not a benchmark."""
        return median(self.ratios) if self.ratios else None

    @property
    def interval(self) -> tuple[float, float] | None:
        """An interval that contains the true median; see `median_interval`."""
        return median_interval(self.ratios)

    @property
    def is_decided(self) -> bool:
        """True if the pairs show a difference, or if there are as many as there can be.

        It tests at the points in `PAIRS` only: a test after every pair would find differences where
        there are none.
        """
        low, high = self.interval or (0.0, 2.0)
        is_other = self.is_at_test and not low <= 1.0 <= high
        return is_other or len(self.ratios) >= PAIRS[-1]

    @property
    def is_at_test(self) -> bool:
        """True after as many pairs as `PAIRS` names."""
        return len(self.ratios) in PAIRS

    def followed_by(self, routed: Text, alone: Text) -> "Comparison":
        """Return the comparison with another pair, of texts that have tokens."""
        ratio = (routed.tokens_per_s or nan) / (alone.tokens_per_s or nan)
        return Comparison(routed, alone, (*self.ratios, ratio))

    @property
    def verdict(self) -> str:
        """The result, such as `equal, 1.37 times as fast with speculation (1.30 to 1.44)`."""
        texts = "equal" if self.equal else f"different from token {self.first_difference} on"
        interval = self.interval
        if interval is None:
            return f"{texts}, too few runs to say how fast"
        low, high = interval
        spread = f"({low:.2f} to {high:.2f})"
        if low <= 1.0 <= high:
            speed = f"no difference in speed measurable {spread}"
        else:
            speed = f"{self.speedup:.2f} times as fast with speculation {spread}"
        drafted = self.routed.metrics.chains.keys() - self.alone.metrics.chains.keys()
        return f"{texts}, {speed}" + ("" if drafted else "; nothing was drafted")

    def __repr__(self) -> str:
        return f"Comparison({self.verdict}: {self.routed!r})"

    def __str__(self) -> str:
        routed, alone = self.routed.figures, self.alone.figures
        return f"{self.verdict}\n  with: {routed}\n  without: {alone}"

    def _repr_html_(self) -> str:
        return f"{self.routed._repr_html_()}<pre>{html.escape(str(self))}</pre>"


def median_interval(values: Sequence[float]) -> tuple[float, float] | None:
    """Return two of the values as a confidence interval of the median, or None for too few values.

    The interval misses the median with a probability of at most 1/128, for any distribution, so
    three tests miss it with at most 3/128. Eight values suffice. Source: Conover, "Practical
    Nonparametric Statistics", section 3.2.
    """
    count, ordered, outside = len(values), sorted(values), 0.0
    for rank in range(count):
        outside += 2 * comb(count, rank) / 2**count  # chance of `rank` or fewer on one side
        if outside > _MISSES:
            return (ordered[rank - 1], ordered[count - rank]) if rank else None
    return None


def _span(text: str, model: str, cycle: int, colours: Mapping[str, str]) -> str:
    if model not in colours:
        return f'<span title="{html.escape(model)}, cycle {cycle}">{html.escape(text)}</span>'
    style = f"background:{colours[model]};color:#111;border-bottom:1px solid #555"
    title = f"{html.escape(model)}, cycle {cycle}"
    return f'<span style="{style}" title="{title}">{html.escape(text)}</span>'
