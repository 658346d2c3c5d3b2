"""A benchmark on one router: batch size after batch size, tuning first, then rounds."""

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

from specrouter.bench import figures, tuning
from specrouter.bench.bare_forward import BareForwards
from specrouter.bench.conditions import conditions
from specrouter.bench.contenders import Contender, OwnContender, Router
from specrouter.bench.lineup import ADAPTIVE, BEST, SMALLEST, Lineup, chain_name
from specrouter.bench.llama_server import LLAMA_SERVER
from specrouter.bench.options import Options
from specrouter.bench.progress import Progress
from specrouter.bench.prompts import BenchPrompt, Work, deal
from specrouter.bench.rounds import measure
from specrouter.bench.sample import EngineTime, Sample
from specrouter.bench.tuning import Shape, Tuned
from specrouter.request.params import Chain

_TUNING_TOKENS = 16  # of each prompt in the first rung; every further one doubles them
_TUNING_BATCHES = 3


class Session:
    """See the module."""

    def __init__(
        self,
        options: Options,
        router: Router,
        who: Lineup,
        prompts: Mapping[str, Sequence[BenchPrompt]],
        outside: Sequence[Contender],
        progress: Progress,
    ) -> None:
        self._options, self._router, self._who = options, router, who
        self._prompts, self._outside, self._progress = prompts, outside, progress
        self._bare = BareForwards(router)

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
            "min_distinct": options.min_distinct,
        }

    def run(self, batch: int, label: str) -> dict[str, Any]:
        """The result of one batch size, as the document has it. `label`: it, to be shown."""
        who = self._who
        tuned = self._tune(batch, label)
        aliases = {SMALLEST: who.smallest} if who.smallest else {}
        best = tuning.best_pair({c: found for c, found in tuned.items() if c in who.pairs})
        if best is not None:
            aliases[BEST] = best.chain
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

        def of_round(number: int) -> list[Work]:
            return deal(
                self._prompts,
                number,
                batch,
                options.new_tokens,
                options.temperature,
                options.by_category,
            )

        return of_round

    def _tune(self, batch: int, label: str) -> dict[Chain, Tuned]:
        """Every chain that is needed, at its best shape."""
        who, engine = self._who, self._router.config.engine
        smallest = () if who.smallest is None else (who.smallest,)
        wanted = list(dict.fromkeys([*who.chains, *who.pairs, *smallest]))
        if not wanted:
            return {}
        # Elsewhere the engine drafts a single path, whatever width is asked for.
        has_trees = engine.exact == "fast" and engine.verification == "shared-noise"
        widths = self._options.widths if has_trees else (1,)
        shapes = tuning.grid(self._options.depths, widths)
        self._progress.expect(len(wanted) * (1 + tuning.measurements(len(shapes))))
        for chain in wanted:  # loads the models, whose time is nobody's
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
        options = self._options
        known = {**samples, **{alias: samples[name] for alias, name in aliases.items()}}
        possible = (
            *("off", "transformers", SMALLEST, BEST),
            *(name for name in self._who.policies if name != ADAPTIVE),
            *("peer", LLAMA_SERVER),
        )
        bases = [base for base in possible if base in known]
        works = self._deal(batch)(0)
        rows = {}
        for name in samples:
            rows[name] = figures.row(
                known,
                name,
                bases,
                [work.category for work in works],
                options.by_category,
                options.min_distinct if options.temperature == 0 else None,
            )
            flat = [sample for of_round in samples[name] for sample in of_round]
            rows[name].update(self._efficiency(batch, flat))
        return rows

    def _efficiency(self, batch: int, samples: Sequence[Sample]) -> dict[str, float]:
        """Of a contender of our own: its speed over what bare forwards would permit."""
        parts = [sample.engine for sample in samples if sample.engine is not None]
        if not parts:
            return {}
        time = EngineTime.total(parts)
        new = self._options.new_tokens
        prompts = [prompt for found in self._prompts.values() for prompt in found]
        halfway = [len(p.token_ids) + (len(p.recorded) or new) / 2 for p in prompts]
        context = round(statistics.fmean(halfway))
        bare_ms = {
            name: self._bare.ms(name, time.mean_pack(name), batch, context)
            for name in time.used_models()
        }
        ideal_ms = figures.ideal_ms_per_token(time, bare_ms)
        measured_ms = 1000 * sum(s.seconds for s in samples) / sum(s.tokens for s in samples)
        return {
            "ms_per_token": measured_ms,
            "ideal_ms_per_token": ideal_ms,
            "efficiency": ideal_ms / measured_ms,
        }
