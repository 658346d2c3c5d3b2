"""A benchmark of chains on one router: batch size after batch size, tuning first, then rounds."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from itertools import product
from typing import Any

from specrouter.bench import figures, tuning
from specrouter.bench.conditions import conditions
from specrouter.bench.contenders import Contender, OwnContender
from specrouter.bench.lineup import ADAPTIVE, BEST, SMALLEST, Lineup, chain_name
from specrouter.bench.llama_server import LLAMA_SERVER
from specrouter.bench.options import ChainsOptions
from specrouter.bench.progress import Progress
from specrouter.bench.prompts import BenchPrompt, Work, deal
from specrouter.bench.sample import MeasurementError, Sample
from specrouter.bench.tuning import Shape, Tuned
from specrouter.request.params import Chain
from specrouter.router import ChainRouter

_TUNING_TOKENS = 16  # of each prompt in the first rung; every further one doubles them
_TUNING_BATCHES = 3


class Session:
    """See the module."""

    def __init__(
        self,
        options: ChainsOptions,
        router: ChainRouter,
        who: Lineup,
        prompts: Mapping[str, Sequence[BenchPrompt]],
        outside: Sequence[Contender],
        progress: Progress,
    ) -> None:
        self._options, self._router, self._who = options, router, who
        self._prompts, self._outside, self._progress = prompts, outside, progress

    def conditions(self) -> dict[str, Any]:
        options = self._options
        return {
            **conditions(self._router),
            "config": options.config.name,
            "workload": options.workload,
            "prompts": {category: len(found) for category, found in self._prompts.items()},
            "rounds": options.rounds,
            "new_tokens": options.new_tokens,
            "temperature": options.temperature,
            "by_category": options.by_category,
        }

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
        contenders = self._contenders(batch, [tuned[chain] for chain in static])
        samples, left_out = measure(
            contenders,
            self._deal(batch),
            self._options.rounds,
            label,
            self._progress,
            lambda name: name.startswith(("transformers", "assisted:")),
        )
        called = {alias: chain_name(chain) for alias, chain in aliases.items()}
        return {
            "aliases": called,
            "shapes": {chain_name(chain): asdict(tuned[chain].shape) for chain in static},
            "tuning": {
                chain_name(one.chain): {**asdict(one.shape), "tokens_per_s": one.tokens_per_s}
                for one in tuned.values()
            },
            "left_out": left_out,
            "contenders": self._rows(batch, samples, called),
        }

    def _deal(self, batch: int) -> Callable[[int], Sequence[Work]]:
        options = self._options
        return partial(
            deal,
            self._prompts,
            batch=batch,
            new_tokens=options.new_tokens,
            temperature=options.temperature,
            by_category=options.by_category,
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
        works = deal(self._prompts, rung, batch, tokens, options.temperature, options.by_category)
        contender = self._static(chain, shape)
        turn = rung * _TUNING_BATCHES  # so that every category has its turn
        chosen = [works[(turn + i) % len(works)] for i in range(min(_TUNING_BATCHES, len(works)))]
        samples = [contender.run(work) for work in chosen]
        self._progress.step()
        return sum(s.tokens for s in samples), sum(s.seconds for s in samples)

    def _static(self, chain: Chain, shape: Shape) -> OwnContender:
        settings = {"chain": chain, **asdict(shape)}
        return OwnContender(chain_name(chain), self._router, "static", settings)

    def _contenders(self, batch: int, static: Sequence[Tuned]) -> list[Contender]:
        own = [
            OwnContender("off", self._router, speculation="off"),
            *(self._static(found.chain, found.shape) for found in static),
            *(OwnContender(policy, self._router, policy) for policy in self._who.policies),
        ]
        return [one for one in [*self._outside, *own] if one.supports(batch)]

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
        by_category = self._options.by_category
        return {name: figures.row(known, name, bases, categories, by_category) for name in samples}


def measure(
    contenders: Sequence[Contender],
    deal: Callable[[int], Sequence[Work]],
    rounds: int,
    label: str,
    progress: Progress,
    may_fail: Callable[[str], bool] = lambda name: False,
) -> tuple[dict[str, list[list[Sample]]], dict[str, str]]:
    """Samples by contender, [round][batch of the round], and why contenders were left out.

    A round before the first one warms up. Contenders that `may_fail` are left out if they do so
    there; any other failure raises `MeasurementError`.

    Args:
        deal: the work of a round, by its number.
    """
    samples: dict[str, list[list[Sample]]] = {one.name: [] for one in contenders}
    left_out: dict[str, str] = {}
    dealt = [deal(number % rounds) for number in range(-1, rounds)]
    progress.expect(sum(map(len, dealt)) * len(contenders))
    for number, works in enumerate(dealt, -1):
        where = f"{label}, round {number + 1}/{rounds}" if number >= 0 else f"{label}, warm-up"
        of_round: dict[str, list[Sample]] = {name: [] for name in samples}
        for work, contender in product(works, contenders):
            name = contender.name
            progress.show(f"{where}: {name}")
            try:
                if name not in left_out:
                    of_round[name].append(contender.run(work))
            except MeasurementError as error:
                if number >= 0 or not may_fail(name):
                    raise
                left_out[name] = str(error)
                progress.note(f"{label}: left out {error}")
            progress.step()
        if number >= 0:
            for name, found in of_round.items():
                samples[name].append(found)
        progress.note(f"{where}: {_summary(of_round)}")
    return {name: samples[name] for name in samples if name not in left_out}, left_out


def _summary(of_round: Mapping[str, Sequence[Sample]]) -> str:
    rounds = {name: found for name, found in of_round.items() if found}
    parts = (f"{name} {figures.speeds([found])[0]:.1f}" for name, found in rounds.items())
    return ", ".join(parts) + " tokens/s"
