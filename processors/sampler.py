"""One rule by which every model of a chain chooses a token from its logits.

The token at output position k is the argmax of `processed logits / temperature + Gumbel(seed, k)`,
plain argmax at temperature 0; ties go to the lowest id. It depends on the logits, the row's
settings, its text and k, and on nothing that stands beside it. Order: logit bias, repetition,
frequency and presence penalties, bad words, least length, own processors, the row's grammar; then,
above temperature 0, temperature, top-k, top-p, min-p, noise. Drafts know no grammar.
Source: the Gumbel-max trick; Daliri, Musco, Suresh, arXiv 2408.07978 (shared noise as a coupling).
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from processors.contexts import Contexts, Ints
from processors.grammar import Bits, GrammarError, Path, TokenGrammar, exclude_others
from processors.logits import (
    NO_TOKEN,
    add_entries,
    best,
    change_rows,
    column,
    ends_with,
    keep_min_p,
    keep_top_k,
    keep_top_p,
    log_shares,
    log_total,
    on_device,
    penalize,
    top,
)
from processors.noise import NoiseBank, uniform

_PURPOSE = 2**32  # streams of one purpose; those of a request's samples are fewer
_PART = 2**19  # scores that a CPU's thread works on at once; more would take memory anew each time


@dataclass(frozen=True)
class SamplingSettings:
    """Of one row. The defaults are greedy, and everything else off."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    min_tokens: int = 0
    end_token_ids: tuple[int, ...] = ()  # excluded while fewer than min_tokens were chosen
    bad_words_ids: tuple[tuple[int, ...], ...] = ()
    # of `transformers`: (input_ids [1, L], scores [1, V]) -> [1, V]
    logits_processors: tuple[Any, ...] = ()
    stream: int = 0  # distinguishes samples that share a seed, below 2**32
    # At its beginning. `min_tokens` then holds an end back only where something else may follow.
    grammar: TokenGrammar | None = field(default=None, compare=False)


class Sampler:
    """Args: `window`: the most output positions of a row that one cycle may look at."""

    def __init__(self, vocab_size: int, window: int) -> None:
        self._vocab_size = vocab_size
        self._window = window
        self._rows: dict[int, _Row] = {}
        # By row, for a look at many contexts at once; a closed row is not plain.
        self._temperatures = np.zeros(0)
        self._plain = np.zeros(0, dtype=np.bool_)
        self._banks: dict[tuple[torch.device, int], NoiseBank] = {}  # per device and purpose
        self._errors: dict[int, Exception] = {}
        self.grammars: dict[int, TokenGrammar] = {}  # of the rows that have one

    def open(
        self,
        row: int,
        settings: SamplingSettings,
        prompt: Sequence[int] = (),
        output: Sequence[int] = (),
    ) -> None:
        """`prompt`, `output`: the committed text so far."""
        self._rows[row] = opened = _Row(settings, prompt, output, self._vocab_size)
        missing = (0, max(0, row + 1 - len(self._plain)))
        self._temperatures = np.pad(self._temperatures, missing)
        self._plain = np.pad(self._plain, missing)
        self._temperatures[row] = settings.temperature
        self._plain[row] = not (opened.edits or opened.warps)
        if settings.grammar is not None:
            settings.grammar.advance(list(output))
            self.grammars[row] = settings.grammar
        if settings.temperature > 0:
            for (_, purpose), bank in self._banks.items():
                bank.open(row, settings.seed, settings.stream + purpose * _PURPOSE)

    def extend(self, row: int, tokens: Sequence[int]) -> None:
        """Output tokens were committed."""
        self._rows[row].extend(tokens)
        if row in self.grammars:
            self.grammars[row].advance(list(tokens))

    def close(self, row: int) -> None:
        if self._rows.pop(row, None) is not None:
            self._plain[row] = False
        self._errors.pop(row, None)
        self.grammars.pop(row, None)
        for bank in self._banks.values():
            bank.close(row)

    def take_errors(self) -> dict[int, Exception]:
        """Rows whose own processors or grammars failed since the last call, and their first errors.

        No token may be chosen where it failed, which matters only if the text comes there.
        """
        errors, self._errors = self._errors, {}
        return errors

    def needs_paths(self, rows: Ints) -> bool:
        """Whether the settings of any of the rows look at the text."""
        return any(self._rows[row].reads_text for row in rows.tolist())

    def masks(self, rows: Ints, positions: Ints, depths: Ints, texts: Ints) -> Bits | None:
        """What grammars allow at n places, [n, ceil(V / 8)]; None if no row has a grammar.

        Every id is allowed where a row has none, and where no text gets to.

        Args:
            rows, positions, depths: [n], as in `Contexts`.
            texts: [n, L] the paths, on the host.
        """
        numbers = rows.tolist()
        restrained = [index for index, row in enumerate(numbers) if row in self.grammars]
        if not restrained:
            return None
        masks: Bits = np.full((len(rows), -(-self._vocab_size // 8)), 255, dtype=np.uint8)
        paths = {index: tuple(texts[index, : depths[index]].tolist()) for index in restrained}
        for index in sorted(restrained, key=lambda index: (numbers[index], paths[index])):
            masks[index] = self._mask(numbers[index], paths[index], int(positions[index]))
        return masks

    def _mask(self, row: int, path: Path, position: int) -> Bits | int:
        try:
            mask = self.grammars[row].mask(path)
        except GrammarError as error:
            self._errors.setdefault(row, error)
            return 0
        if mask is None:
            return 255
        if position < self._rows[row].settings.min_tokens:
            going_on = mask & ~self._rows[row].end_bits
            return going_on if going_on.any() else mask
        return mask

    def scores(self, logits: Tensor, contexts: Contexts, purpose: int = 0) -> Tensor:
        """What the choice is the argmax of, [n, V] float64; plain greedy: `logits` itself.

        Args:
            logits: [n, V] in any precision; left as they are.
            purpose: of the noise. 0 is that which all models share; others are independent of it.

        Waits for the device only if a row has processors of its own.
        """
        return self._scores(logits, contexts, purpose, torch.float64)

    def choose(self, logits: Tensor, contexts: Contexts) -> tuple[Tensor, Tensor]:
        """Choices [n] int64, and their scores [n]: NaN where logits hold NaN."""
        found = [best(self.scores(*part)) for part in _parts(logits, contexts)]
        values, ids = _joined(found)
        return ids.squeeze(1), values.squeeze(1)

    def rank(
        self, logits: Tensor, contexts: Contexts, width: int, purpose: int = 0
    ) -> tuple[Tensor, Tensor]:
        """The `width` best ids [n, width], best first, and their log-softmax of the scores.

        The first is the choice, up to rounding: drafts need not be exact, and their scores are
        float32 unless logits are float64, a row's are edited, or the noise is not the shared one.
        Log-probabilities are float64, at most 0, NaN where logits hold NaN. Ties behind the first
        place are in no order.
        """
        found = [self._rank(*part, width, purpose) for part in _parts(logits, contexts)]
        return _joined(found)

    def _rank(
        self, logits: Tensor, contexts: Contexts, width: int, purpose: int
    ) -> tuple[Tensor, Tensor]:
        # Draws by another noise than the shared one have a distribution to keep.
        exact = purpose > 0 or logits.dtype == torch.float64
        precision = torch.float64 if exact else torch.float32
        scores = self._scores(logits, contexts, purpose, precision)
        values, ids = top(scores, width)
        return ids, log_shares(scores, values, ids)

    def log_probabilities(self, logits: Tensor, contexts: Contexts, tokens: Tensor) -> Tensor:
        """Log-softmax of the scores [n] float64, at `tokens[i]` in context i."""
        scores = self.scores(logits, contexts)
        return _log_probabilities(
            scores, log_total(scores), torch.arange(len(tokens), device=scores.device), tokens
        )

    def judge(
        self, logits: Tensor, contexts: Contexts, parents: Tensor, tokens: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """`choose`, and log-probabilities under the same scores.

        Args:
            parents, tokens: [m], a context, and an id after it.

        Returns:
            Choices [n], their scores [n], their log-probabilities [n] float64, and those of the
            tokens [m] float64.
        """
        scores = self.scores(logits, contexts)
        values, ids = best(scores)
        total = log_total(scores)
        own = (values.double() - total).clamp_(max=0.0)
        others = _log_probabilities(scores, total, parents, tokens)
        return ids.squeeze(1), values.squeeze(1), own.squeeze(1), others

    def distribution(self, logits: Tensor, contexts: Contexts) -> Tensor:
        """Probabilities [n, V] float64 before noise; all on the choice at temperature 0."""
        rows = self._rows_of(contexts)
        scores = self._processed(logits, rows, contexts, torch.float64)
        greedy = [index for index, row in enumerate(rows) if row.settings.temperature == 0]
        if len(greedy) == len(rows):
            return _one_hot(scores)
        probabilities = scores.softmax(dim=-1)
        if greedy:
            where = on_device(np.array(greedy, dtype=np.int64), scores.device)
            probabilities.index_copy_(0, where, _one_hot(scores.index_select(0, where)))
        return probabilities

    def noise(self, contexts: Contexts, purpose: int, like: Tensor | None = None) -> Tensor:
        """Gumbel noise [n, V] float64 of each place, 0 at temperature 0.

        `like`: logits, whose vocabulary and device it takes; else the whole one, on the host.
        """
        like = torch.empty(0, self._vocab_size) if like is None else like
        rows = self._rows_of(contexts)
        sampled = [index for index, row in enumerate(rows) if row.settings.temperature > 0]
        shape = (len(rows), like.shape[-1])
        noise = torch.zeros(shape, dtype=torch.float64, device=like.device)
        if sampled:
            where = on_device(np.array(sampled, dtype=np.int64), like.device)
            noise.index_copy_(0, where, self._noise(like, contexts, sampled, purpose))
        return noise

    def noise_at(self, row: int, position: int, ids: Ints) -> NDArray[np.float64]:
        """The shared noise of a row's output position at some ids, on the host."""
        if self._rows[row].settings.temperature == 0:
            return np.zeros(len(ids))
        values = self._bank(torch.device("cpu"), 0).peek(row, position).numpy()
        noise: NDArray[np.float64] = values[ids]
        return noise

    def uniforms(self, contexts: Contexts, purpose: int) -> NDArray[np.float64]:
        """A number in [0, 1) of each place, [n], independent of all Gumbel noise."""
        positions, draws = contexts.positions.tolist(), _draws(contexts).tolist()
        values = [
            uniform(row.settings.seed, position, row.settings.stream + purpose * _PURPOSE, draw)
            for row, position, draw in zip(self._rows_of(contexts), positions, draws, strict=True)
        ]
        return np.array(values, dtype=np.float64)

    def _rows_of(self, contexts: Contexts) -> "list[_Row]":
        return [self._rows[row] for row in contexts.rows.tolist()]

    def _noise(
        self,
        like: Tensor,
        contexts: Contexts,
        sampled: "list[int] | slice",
        purpose: int,
        dtype: torch.dtype = torch.float64,
    ) -> Tensor:
        """[len(sampled), V] of the sampled ones among the contexts, of its own memory."""
        bank = self._bank(like.device, purpose)
        rows, positions = contexts.rows[sampled], contexts.positions[sampled]
        draws = _draws(contexts)[sampled] if purpose else None
        return bank.take(rows, positions, draws, dtype)[:, : like.shape[-1]]

    def _bank(self, device: torch.device, purpose: int) -> NoiseBank:
        if (device, purpose) not in self._banks:
            bank = NoiseBank(self._vocab_size, self._window, device)
            for number, row in self._rows.items():
                if row.settings.temperature > 0:
                    stream = row.settings.stream + purpose * _PURPOSE
                    bank.open(number, row.settings.seed, stream)
            self._banks[device, purpose] = bank
        return self._banks[device, purpose]

    # Processing

    def _scores(
        self, logits: Tensor, contexts: Contexts, purpose: int, precision: torch.dtype
    ) -> Tensor:
        """See `scores`. `precision`: float64, or float32 for rows that are not edited."""
        temperatures = self._temperatures[contexts.rows]
        plain = contexts.masks is None and bool(self._plain[contexts.rows].all())
        if plain and not temperatures.any():
            return logits
        if plain and temperatures.all():  # into the noise's memory: of few passes over it
            noise = self._noise(logits, contexts, slice(None), purpose, precision)
            if (temperatures == 1.0).all():
                return noise.add_(logits)
            return noise.add_(logits.to(precision) / column(temperatures, logits.device, precision))
        rows = self._rows_of(contexts)
        if contexts.masks is not None or any(row.edits for row in rows):
            precision = torch.float64
        scores = self._processed(logits, rows, contexts, precision)
        sampled = [index for index, row in enumerate(rows) if row.settings.temperature > 0]
        if sampled:
            noise = self._noise(logits, contexts, sampled, purpose, precision)
            if len(sampled) == len(rows):
                scores.add_(noise)
            else:
                where = on_device(np.array(sampled, dtype=np.int64), logits.device)
                scores.index_add_(0, where, noise)
        return scores

    def _processed(
        self, logits: Tensor, rows: "list[_Row]", contexts: Contexts, precision: torch.dtype
    ) -> Tensor:
        """Scores without noise, of its own memory unless all rows are plain greedy."""
        scores = logits
        if contexts.masks is not None or any(row.edits for row in rows):
            scores = logits.to(torch.float64, copy=True)
            self._edit(scores, rows, contexts)
        temperatures = [row.settings.temperature for row in rows]
        if any(temperature > 0 for temperature in temperatures):
            # A greedy row's divisor is 1.
            divisors = [t if t > 0 else 1.0 for t in temperatures]
            scores = scores.to(precision) / column(divisors, logits.device, precision)
            _warp(scores, [row.settings for row in rows])
        return scores

    def _edit(self, scores: Tensor, rows: "list[_Row]", contexts: Contexts) -> None:
        """All that comes before the temperature."""
        if any(contexts.depths[i] for i, row in enumerate(rows) if row.reads_text):
            assert contexts.paths is not None, "settings look at the text, but paths are unknown"
        biased = [index for index, row in enumerate(rows) if len(row.biased)]
        if biased:
            _add_biases(scores, rows, biased)
        penalized = [index for index, row in enumerate(rows) if row.penalized]
        if penalized:
            self._penalize(scores, rows, penalized, contexts)
        excluded = [index for index, row in enumerate(rows) if row.excludes]
        if excluded:
            _exclude_ids(scores, rows, excluded, contexts)
        phrased = [index for index, row in enumerate(rows) if len(row.endings)]
        if phrased:
            _exclude_endings(scores, rows, phrased, contexts)
        for index, row in enumerate(rows):
            if row.settings.logits_processors:
                self._run_processors(scores[index : index + 1], row, contexts, index)
        if contexts.masks is not None:
            restrained = [index for index, row in enumerate(rows) if row.settings.grammar]
            masks = _pick(contexts.masks, restrained)
            change_rows(scores, restrained, lambda part: exclude_others(part, masks))

    def _penalize(
        self, scores: Tensor, rows: "list[_Row]", which: list[int], contexts: Contexts
    ) -> None:
        device, size = scores.device, scores.shape[-1]
        counted = [rows[index].counts(device) for index in which]
        in_prompt = torch.stack([one.in_prompt for one in counted])
        in_output = torch.stack([one.in_output for one in counted])
        depths = contexts.depths[which]
        if contexts.paths is not None and depths.any():
            paths = _pick(contexts.paths, which)
            steps = torch.arange(paths.shape[1], device=device)
            real = steps < on_device(depths, device).unsqueeze(1)
            in_output.scatter_add_(1, paths.where(real, 0), real.to(in_output.dtype))
        settings = [rows[index].settings for index in which]
        repetition = column([s.repetition_penalty for s in settings], device)
        presence = column([s.presence_penalty for s in settings], device)
        frequency = column([s.frequency_penalty for s in settings], device)

        def change(part: Tensor) -> None:
            penalize(
                part, in_prompt[:, :size], in_output[:, :size], repetition, presence, frequency
            )

        change_rows(scores, which, change)

    def _run_processors(self, scores: Tensor, row: "_Row", contexts: Contexts, index: int) -> None:
        """`scores` [1, V] of the context `index`."""
        text = torch.tensor([row.text], dtype=torch.int64, device=scores.device)
        depth = int(contexts.depths[index])
        if contexts.paths is not None and depth:
            text = torch.cat((text, contexts.paths[index : index + 1, :depth]), dim=1)
        for processor in row.settings.logits_processors:
            try:
                scores.copy_(_result(processor, text, scores))
            except Exception as error:  # the caller's code: it may raise anything
                self._errors.setdefault(int(contexts.rows[index]), error)
                scores.fill_(float("-inf"))
                return


class _Row:
    """An open row: its settings, what they ask for, and its text if they look at that."""

    def __init__(
        self,
        settings: SamplingSettings,
        prompt: Sequence[int],
        output: Sequence[int],
        vocab_size: int,
    ) -> None:
        self.settings = settings
        self.biased = np.array([token for token, _ in settings.logit_bias], dtype=np.int64)
        self.biases = np.array([bias for _, bias in settings.logit_bias], dtype=np.float64)
        self.penalized = (
            settings.repetition_penalty != 1.0
            or settings.presence_penalty != 0.0
            or settings.frequency_penalty != 0.0
        )
        words = set(settings.bad_words_ids)
        self.bad = np.array(sorted(word[0] for word in words if len(word) == 1), dtype=np.int64)
        self.bad_or_end = np.union1d(self.bad, np.array(settings.end_token_ids, dtype=np.int64))
        is_held = settings.grammar is None and settings.min_tokens > 0  # else its mask sees to it
        self._held_until = settings.min_tokens if is_held else 0
        self.excludes = len(self.bad) > 0 or (is_held and len(settings.end_token_ids) > 0)
        ends = np.isin(np.arange(vocab_size if settings.grammar else 0), settings.end_token_ids)
        self.end_bits: Bits = np.packbits(ends, bitorder="little")
        phrases = sorted(word for word in words if len(word) > 1)
        longest = max((len(word) - 1 for word in phrases), default=0)
        self.endings = np.array([word[-1] for word in phrases], dtype=np.int64)
        self.beginnings = np.full((len(phrases), longest), NO_TOKEN, dtype=np.int64)
        for index, word in enumerate(phrases):
            self.beginnings[index, longest - len(word) + 1 :] = word[:-1]
        self.reads_text = self.penalized or len(phrases) > 0 or len(settings.logits_processors) > 0
        self.edits = self.reads_text or self.excludes or len(self.biased) > 0
        self.warps = settings.temperature > 0 and (
            settings.top_k > 0 or settings.top_p < 1.0 or settings.min_p > 0.0
        )
        self.text = [*prompt, *output] if self.reads_text else []
        self._prompt_length = len(prompt)
        self._vocab_size = vocab_size
        self._counts: dict[torch.device, _Counts] = {}

    def extend(self, tokens: Sequence[int]) -> None:
        if self.reads_text:
            self.text.extend(tokens)

    def excluded(self, position: int) -> Ints:
        """Ids that may not stand at an output position, whatever stands before it."""
        return self.bad_or_end if position < self._held_until else self.bad

    def counts(self, device: torch.device) -> "_Counts":
        """Of the committed text, brought up to date."""
        with torch.inference_mode(False):  # they are changed outside of inference, too
            if device not in self._counts:
                in_prompt = torch.zeros(self._vocab_size, dtype=torch.bool)
                in_prompt[self.text[: self._prompt_length]] = True
                self._counts[device] = _Counts(
                    in_prompt.to(device, non_blocking=True),
                    torch.zeros(self._vocab_size, dtype=torch.int32, device=device),
                    self._prompt_length,
                )
            counts = self._counts[device]
            new = torch.tensor(self.text[counts.length :], dtype=torch.int64)
            if len(new):
                ones = torch.ones(len(new), dtype=torch.int32, device=device)
                counts.in_output.index_add_(0, new.to(device, non_blocking=True), ones)
                counts.length = len(self.text)
        return counts


@dataclass
class _Counts:
    in_prompt: Tensor  # [vocab_size] bool
    in_output: Tensor  # [vocab_size] int32
    length: int  # of the text that was counted


def _parts(logits: Tensor, contexts: Contexts) -> Iterator[tuple[Tensor, Contexts]]:
    """Contexts are independent: a CPU takes as many at once as its caches hold."""
    count, size = logits.shape
    threads = torch.get_num_threads()
    rows = max(threads, threads * _PART // size) if logits.device.type == "cpu" else count
    if rows >= count:
        yield logits, contexts
        return
    for start in range(0, count, rows):
        stop = min(count, start + rows)
        yield logits[start:stop], contexts.part(start, stop)


def _joined(found: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    if len(found) == 1:
        return found[0]
    first, second = zip(*found, strict=True)
    return torch.cat(first), torch.cat(second)


def _warp(scores: Tensor, settings: list[SamplingSettings]) -> None:
    """All that comes after the temperature, for rows above temperature 0."""
    device, size = scores.device, scores.shape[-1]
    sampled = [(index, s) for index, s in enumerate(settings) if s.temperature > 0]
    limits = [(index, s.top_k) for index, s in sampled if 0 < s.top_k < size]
    if limits:
        top_k = [k for _, k in limits]
        change_rows(scores, [index for index, _ in limits], lambda part: keep_top_k(part, top_k))
    shares = [(index, s.top_p) for index, s in sampled if s.top_p < 1.0]
    if shares:
        top_p = column([p for _, p in shares], device)
        change_rows(scores, [index for index, _ in shares], lambda part: keep_top_p(part, top_p))
    ratios = [(index, s.min_p) for index, s in sampled if s.min_p > 0.0]
    if ratios:
        min_p = column([p for _, p in ratios], device)
        change_rows(scores, [index for index, _ in ratios], lambda part: keep_min_p(part, min_p))


def _add_biases(scores: Tensor, rows: list[_Row], which: list[int]) -> None:
    ids = np.concatenate([rows[index].biased for index in which])
    biases = np.concatenate([rows[index].biases for index in which])
    places = np.repeat(which, [len(rows[index].biased) for index in which])
    known = ids < scores.shape[-1]
    add_entries(scores, places[known], ids[known], on_device(biases[known], scores.device))


def _exclude_ids(scores: Tensor, rows: list[_Row], which: list[int], contexts: Contexts) -> None:
    """Bad words of one token, and ends that come too early."""
    excluded = [rows[index].excluded(int(contexts.positions[index])) for index in which]
    ids = np.concatenate(excluded)
    places = np.repeat(which, [len(one) for one in excluded])
    known = ids < scores.shape[-1]
    values = scores.new_full((int(known.sum()),), -math.inf)
    add_entries(scores, places[known], ids[known], values)


def _exclude_endings(
    scores: Tensor, rows: list[_Row], which: list[int], contexts: Contexts
) -> None:
    """The last ids of bad words whose other ids the text ends with."""
    device, size = scores.device, max(rows[index].beginnings.shape[1] for index in which)
    committed = np.full((len(which), size), NO_TOKEN, dtype=np.int64)
    patterns = list[Ints]()
    for line, index in enumerate(which):
        tail = rows[index].text[-size:]
        committed[line, size - len(tail) :] = tail
        beginnings = rows[index].beginnings
        padding = ((0, 0), (size - beginnings.shape[1], 0))
        patterns.append(np.pad(beginnings, padding, constant_values=NO_TOKEN))
    tails, depths = on_device(committed, device), contexts.depths[which]
    if contexts.paths is not None and depths.any():
        texts = torch.cat((tails, _pick(contexts.paths, which)), dim=1)
        tails = texts.gather(1, on_device(depths[:, None] + np.arange(size), device))
    ids = np.concatenate([rows[index].endings for index in which])
    owners = np.repeat(np.arange(len(which)), [len(one) for one in patterns])
    known = ids < scores.shape[-1]
    owners = owners[known]
    matching = ends_with(
        tails.index_select(0, on_device(owners, device)),
        on_device(np.concatenate(patterns)[known], device),
    )
    values = scores.new_zeros(len(owners)).masked_fill_(matching, -math.inf)
    add_entries(scores, np.array(which)[owners], ids[known], values)


def _result(processor: Any, text: Tensor, scores: Tensor) -> Tensor:
    """What a processor makes of `scores`, which it cannot change itself."""
    result = processor(text, scores.clone())
    if not isinstance(result, Tensor) or result.shape != scores.shape:
        shape = tuple(result.shape) if isinstance(result, Tensor) else type(result).__name__
        name = type(processor).__name__
        raise ValueError(f"{name} must return scores {tuple(scores.shape)}, not {shape}")
    if bool(result.isnan().any()) and not bool(scores.isnan().any()):
        raise ValueError(f"{type(processor).__name__} returned NaN")
    return result


def _log_probabilities(scores: Tensor, total: Tensor, places: Tensor, tokens: Tensor) -> Tensor:
    """[m] float64; -inf of ids that the vocabulary does not hold."""
    size = scores.shape[-1]
    known = (tokens >= 0) & (tokens < size)
    values = scores[places, tokens.clamp(0, size - 1)].double() - total.squeeze(1)[places]
    return values.clamp_(max=0.0).masked_fill_(~known, -math.inf)


def _one_hot(scores: Tensor) -> Tensor:
    """[n, V] float64, all on each row's argmax; NaN there if the scores hold NaN."""
    values, ids = scores.max(dim=-1, keepdim=True)
    mass = torch.ones(ids.shape, dtype=torch.float64, device=ids.device)
    mass.masked_fill_(values.isnan(), math.nan)
    return mass.new_zeros(scores.shape).scatter_(1, ids, mass)


def _pick(tensor: Tensor, which: list[int]) -> Tensor:
    if len(which) == len(tensor):
        return tensor
    return tensor.index_select(0, on_device(np.array(which, dtype=np.int64), tensor.device))


def _draws(contexts: Contexts) -> Ints:
    """[n] which draw for its position it is: where its cycle began.

    A draw that a cycle threw away may have moved the router's next decision. The position is drawn
    anew in a later cycle, and must then know nothing of it.
    """
    draws: Ints = contexts.positions - contexts.depths + 1
    return draws
