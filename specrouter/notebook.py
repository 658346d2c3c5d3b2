"""Texts as a notebook shows them: each token in the colour of the model that proposed it.

Contract: tokens are escaped, and can be told apart without colours: what a drafter proposed is
underlined, and the title of a token names its model and its cycle.
"""

import html
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from specrouter.request.output import RequestOutput

# Of drafters. Pale, under dark text; the target's own tokens have none.
_COLOURS = ("#fde68a", "#bfdbfe", "#bbf7d0", "#fbcfe8", "#ddd6fe", "#fed7aa", "#a5f3fc", "#e5e7eb")
_TEXT = "white-space:pre-wrap;font-family:monospace;line-height:1.6"
_NOTE = "color:gray;font-size:smaller"


def figures(output: RequestOutput) -> str:
    """One line: `64 tokens (length) | 310.2 tokens/s | ttft 41 ms | acceptance length 2.78 | ...`,
    the most used chain first."""
    metrics, rate = output.metrics, output.metrics.tokens_per_s
    parts = [f"{metrics.output_tokens} tokens ({output.finish_reason})"]
    if rate is not None:
        parts += [f"{rate:.1f} tokens/s", f"ttft {metrics.ttft_ms:.0f} ms"]
    if metrics.cycles:
        chains = Counter(metrics.chains).most_common()
        shares = (f"{'>'.join(chain)} {count / metrics.cycles:.0%}" for chain, count in chains)
        parts += [f"acceptance length {metrics.acceptance_length:.2f}", ", ".join(shares)]
    if metrics.attained is not None:
        parts.append("objective attained" if metrics.attained else "objective missed")
    return " | ".join([*parts, f"seed {output.seed}"])


@dataclass(frozen=True, kw_only=True, repr=False)
class Text(RequestOutput):
    """An output that a notebook shows: see `RequestOutput`. It was asked for with its `drafts`."""

    @property
    def tokens_per_s(self) -> float | None:
        return self.metrics.tokens_per_s

    @property
    def tokens(self) -> Iterator[tuple[str, str, int]]:
        """Of each what it adds to the text, the model that proposed it, and the cycle."""
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
    """One after the other."""

    def _repr_html_(self) -> str:
        return "<hr>".join(text._repr_html_() for text in self)


@dataclass(frozen=True)
class Comparison:
    """The same request, `routed` and by the target `alone`, one after the other."""

    routed: Text
    alone: Text

    @property
    def first_difference(self) -> int | None:
        """The first token that differs, from 0; None: the texts are equal."""
        routed, alone = self.routed.token_ids, self.alone.token_ids
        shorter = min(len(routed), len(alone))
        at = next((at for at in range(shorter) if routed[at] != alone[at]), shorter)
        return None if routed == alone else at

    @property
    def equal(self) -> bool:
        return self.first_difference is None

    @property
    def speedup(self) -> float | None:
        """Tokens/s, routed to alone: of one request, so it is no benchmark."""
        routed, alone = self.routed.tokens_per_s, self.alone.tokens_per_s
        return routed / alone if routed and alone else None

    @property
    def _verdict(self) -> str:
        verdict = "equal" if self.equal else f"different from token {self.first_difference} on"
        return f"{verdict}, with speculation {self.speedup or 1:.2f} times as fast"

    def __repr__(self) -> str:
        return f"Comparison({self._verdict}: {self.routed!r})"

    def __str__(self) -> str:
        routed, alone = self.routed.figures, self.alone.figures
        return f"{self._verdict}\n  with: {routed}\n  without: {alone}"

    def _repr_html_(self) -> str:
        return f"{self.routed._repr_html_()}<pre>{html.escape(str(self))}</pre>"


def _span(text: str, model: str, cycle: int, colours: Mapping[str, str]) -> str:
    if model not in colours:
        return f'<span title="{html.escape(model)}, cycle {cycle}">{html.escape(text)}</span>'
    style = f"background:{colours[model]};color:#111;border-bottom:1px solid #555"
    title = f"{html.escape(model)}, cycle {cycle}"
    return f'<span style="{style}" title="{title}">{html.escape(text)}</span>'
