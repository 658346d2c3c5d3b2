"""A benchmark of chains on one router: batch size after batch size, tuning first, then rounds."""

import argparse
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from statistics import fmean
from typing import Any, Protocol

from research.bench import tuning
from research.bench.lineup import ADAPTIVE, BEST, SMALLEST, Lineup
from research.bench.llama_server import LLAMA_SERVER
from research.bench.recorded import RecordedContender
from research.bench.tuning import Shape, Tuned
from specrouter.bench import figures
from specrouter.bench.chains import chain_name
from specrouter.bench.contenders import Contender, MeasurementError, OwnContender, measure
from specrouter.bench.figures import Spread
from specrouter.bench.prompts import BenchPrompt, Work, deal
from specrouter.progress import Progress
from specrouter.request.params import Chain
from specrouter.router import ChainRouter

_TUNING_TOKENS = 16  # of each prompt in the first rung; every further one doubles them
_TUNING_BATCHES = 3


class Outside(Contender, Protocol):
    """Another program."""

    def supports(self, batch: int) -> bool: ...


class Session:
    """See the module."""

    def __init__(
        self,
        options: argparse.Namespace,
        router: ChainRouter,
        who: Lineup,
        prompts: Mapping[str, Sequence[BenchPrompt]],
        outside: Sequence[Outside],
        progress: Progress,
    ) -> None:
        self._options, self._router, self._who = options, router, who
        self._prompts, self._outside, self._progress = prompts, outside, progress

    def run(self, batch: int, label: str) -> dict[str, Any]:
        """The result of one batch size, as the document has it. `label`: it, to be shown."""
        who = self._who
        tuned = self._tune(batch, label)
        aliases = {SMALLEST: who.smallest} if who.smallest else {}
        if who.pairs:
            aliases[BEST] = max(who.pairs, key=lambda chain: tuned[chain].tokens_per_s)
        for alias, chain in aliases.items():
            self._progress.note(f"{label}: {alias} is {chain_name(chain)}, {tuned[chain].shape}")
        static = [c for c in tuned if c in who.chains or c in aliases.values()]
        contenders, left_out = self._contenders(batch, [tuned[chain] for chain in static])
        options = self._options
        samples = measure(contenders, self._deal(batch), options.rounds, label, self._progress)
        called = {alias: chain_name(chain) for alias, chain in aliases.items()}
        shapes = {chain_name(chain): tuned[chain].shape for chain in static}
        return {
            "aliases": called,
            "shapes": {name: asdict(shape) for name, shape in shapes.items()},
            "tuning": {
                chain_name(one.chain): {**asdict(one.shape), "tokens_per_s": one.tokens_per_s}
                for one in tuned.values()
            },
            "left_out": left_out,
            "contenders": self._rows(batch, samples, called),
            "notes": [
                *(f"  {alias} is {name}" for alias, name in called.items()),
                *(f"  {name}: {shape}" for name, shape in shapes.items()),
                *(f"  left out: {name}: {reason}" for name, reason in left_out.items()),
            ],
        }

    def _deal(self, batch: int, new_tokens: int = 0) -> Callable[[int], Sequence[Work]]:
        options = self._options
        return partial(
            deal_by_category if options.by_category else deal,
            self._prompts,
            batch=batch,
            new_tokens=new_tokens or options.new_tokens,
            temperature=options.temperature,
        )

    def _tune(self, batch: int, label: str) -> dict[Chain, Tuned]:
        """Every chain that is needed, at its best shape."""
        who, engine = self._who, self._router.config.engine
        smallest = () if who.smallest is None else (who.smallest,)
        wanted = list(dict.fromkeys([*who.chains, *who.pairs, *smallest]))
        if not wanted:
            return {}
        # Elsewhere the engine drafts a single path, whatever width is asked for.
        has_trees = engine.exact == "fast"
        widths = self._options.widths if has_trees else (1,)
        shapes = tuning.grid(self._options.depths, widths)
        self._progress.expect(len(wanted) * (1 + tuning.measurements(len(shapes))))
        for chain in wanted:  # loads the models, whose time does not count
            self._short_run(batch, label, chain, shapes[0], 0)
        tuned = tuning.tune(wanted, shapes, partial(self._short_run, batch, label))
        for found in tuned.values():
            self._progress.note(
                f"{label}: {chain_name(found.chain)} is best at {found.shape} "
                f"({found.tokens_per_s:.1f} tokens/s)"
            )
        return tuned

    def _short_run(
        self, batch: int, label: str, chain: Chain, shape: Shape, rung: int
    ) -> tuple[int, float]:
        """Tokens and seconds of a few batches; all chains and shapes get the same ones."""
        options = self._options
        self._progress.show(f"{label}, tuning {chain_name(chain)}: {shape}")
        tokens = min(_TUNING_TOKENS << rung, options.new_tokens)
        works = self._deal(batch, tokens)(rung)
        contender = self._static(chain, shape)
        turn = rung * _TUNING_BATCHES  # so that every category has its turn
        chosen = [works[(turn + i) % len(works)] for i in range(min(_TUNING_BATCHES, len(works)))]
        samples = [contender.run(work) for work in chosen]
        self._progress.step()
        return sum(s.tokens for s in samples), sum(s.seconds for s in samples)

    def _static(self, chain: Chain, shape: Shape) -> OwnContender:
        settings = {"chain": chain, **asdict(shape)}
        return RecordedContender(chain_name(chain), self._router, "static", settings)

    def _contenders(
        self, batch: int, static: Sequence[Tuned]
    ) -> tuple[list[Contender], dict[str, str]]:
        """Those that can serve such a batch, and why others are left out: they fail to."""
        outside, left_out = list[Contender](), dict[str, str]()
        for one in self._outside:
            if not one.supports(batch):
                continue
            try:
                one.run(self._deal(batch)(0)[0])
            except MeasurementError as error:
                left_out[one.name] = str(error)
                self._progress.note(f"left out {error}")
            else:
                outside.append(one)
        router = self._router
        own = [
            RecordedContender("off", router, speculation="off"),
            *(self._static(found.chain, found.shape) for found in static),
            *(RecordedContender(policy, router, policy) for policy in self._who.policies),
        ]
        return [*outside, *own], left_out

    def _rows(
        self, batch: int, samples: Mapping[str, figures.Rounds], aliases: Mapping[str, str]
    ) -> dict[str, Any]:
        known = {**samples, **{alias: samples[name] for alias, name in aliases.items()}}
        possible = (
            *("off", "transformers", SMALLEST, BEST),
            *(name for name in self._who.policies if name != ADAPTIVE),
            *("peer", LLAMA_SERVER),
        )
        bases = [base for base in possible if base in known]
        categories = [work.category for work in self._deal(batch)(0)]
        rows = {name: figures.row(known, name, bases, categories) for name in samples}
        for row in rows.values() if self._options.by_category else ():
            found = row["over_by_category"].values()
            row["over"] = {base: mean_spread([one[base] for one in found]) for base in bases}
        return rows


def deal_by_category(
    prompts: Mapping[str, Sequence[BenchPrompt]], round_number: int, batch: int, **asked: Any
) -> list[Work]:
    """As `deal`, a batch of each category."""
    each = [{category: found} for category, found in prompts.items()]
    works = [work for own in each for work in deal(own, round_number, batch, **asked)]
    seeds = itertools.count(10_000 * round_number)
    return [replace(work, seeds=tuple(itertools.islice(seeds, batch))) for work in works]


def mean_spread(found: Sequence[Spread]) -> Spread:
    """The mean over categories of their medians, and of their quartiles."""
    return Spread(
        median=fmean(one["median"] for one in found),
        low=fmean(one["low"] for one in found),
        high=fmean(one["high"] for one in found),
    )
