"""Every class of transformers that writes texts: served exactly, or refused with a reason.

A small random model of each is served in float64, alone and with drafts of a noisy copy of itself,
and compared with its own `generate`. The named families get every check; what is only swept gets
fewer. No class may give another text than `generate`, and none may end in a traceback.
"""

import contextlib
import functools
import os
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal
from unittest import mock

import transformers

from checks.exact.comparison import first_difference
from checks.exact.named_families import NAMED
from checks.exact.report import Progress, finish, make_parser, prepare
from checks.exact.small_configs import VOCAB_SIZE, WINDOW, Family, swept
from checks.exact.small_models import (
    Tokens,
    forgetting,
    generated,
    load,
    prompts_of,
    put_inside,
    random_model,
    save,
)
from modelpool import ModelPool
from modelpool.errors import ConfigError
from specrouter import ChainRouter, RequestOutput, SamplingParams, Speculation
from specrouter.execution import model_times
from specrouter.execution.time_profile import profile_model
from specrouter.request.spec import SpeculationOverride
from test_support.families import perturb, pool_settings
from test_support.preemption import preempting_router
from test_support.routers import assert_whole

LENGTHS, NEW_TOKENS, PREFILL_CHUNK = (5, 24, 47, 90), 24, 40
NOISE = 0.03  # of the drafter, beside the target
DEPTH, WIDTHS = 4, (1, 3)
CHAIN = ("near", "target")
ROWS, PREEMPTED, HANDED = 16, 0.15, 9  # PREEMPTED: of the running rows, in each cycle
GREEDY = SamplingParams(max_new_tokens=NEW_TOKENS, ignore_eos=True, prefix_cache=False)
BRIEFLY = functools.partial(profile_model, budget_s=0.05)
Status = Literal["exact", "refused", "not built", "WRONG", "FAULT"]


class NoTextError(Exception):
    """A class that has no text of its own to be compared with."""


@dataclass(kw_only=True)
class Verdict:
    """What became of a family.

    Attributes:
        reason: of a refusal, of what was not built, of a difference or of a fault.
        before_weights: of a refusal: it came before a weight was read.
        distinct: different tokens in all reference texts.
        depends: of a text's tokens, those that only hold because of what was said long before.
        accepted: draft tokens that became text.
        seconds: of processors, in all threads.
    """

    name: str
    status: Status = "exact"
    reason: str = ""
    before_weights: bool | None = None
    distinct: int = 0
    depends: int = 0
    accepted: int = 0
    checks: int = 0
    seconds: float = 0.0


@dataclass(frozen=True)
class Paths:
    """Of the checkpoints of a family."""

    far: Path
    near: Path
    target: Path
    reference: Path


@dataclass
class Served:
    """A router under check, and the texts that are wanted of it."""

    router: ChainRouter
    texts: dict[Tokens, Tokens]
    differences: list[str] = field(default_factory=list)
    accepted: int = 0
    checks: int = 0

    def check(
        self,
        what: str,
        prompts: Sequence[Tokens],
        speculation: SpeculationOverride = "off",
        together: bool = True,
    ) -> None:
        """Greedy texts are those of `generate`."""
        groups = [list(prompts)] if together else [[prompt] for prompt in prompts]
        for group in groups:
            outputs = self.outputs(group, GREEDY, speculation)
            wanted = [self.texts[prompt] for prompt in group]
            self.compare(what, outputs, wanted)

    def compare(
        self, what: str, outputs: Sequence[RequestOutput], wanted: Sequence[Tokens]
    ) -> None:
        self.checks += 1
        for output, text in zip(outputs, wanted, strict=True):
            at = first_difference(output.token_ids, text)
            if at is not None:
                length = output.metrics.prompt_tokens
                self.differences.append(f"{what}: prompt of {length} tokens, token {at}")

    def outputs(
        self, prompts: Sequence[Tokens], params: SamplingParams, speculation: SpeculationOverride
    ) -> list[RequestOutput]:
        outputs = self.router.generate(list(prompts), params, speculation)
        errors = [output.error for output in outputs if output.error]
        if errors:
            raise RuntimeError(f"a request ended with {errors[0]}")
        self.accepted += sum(output.metrics.accepted_tokens for output in outputs)
        return outputs


def judge(family: Family, is_thorough: bool) -> Verdict:
    """Builds, serves and compares a family."""
    verdict, started = Verdict(name=family.name), time.process_time()
    with tempfile.TemporaryDirectory() as directory:
        try:
            paths = build(family, Path(directory))
        except Exception as error:  # of a class of transformers, in its own words
            verdict.status, verdict.reason = "not built", _told(error)
        else:
            _serve(family, paths, is_thorough, verdict)
    verdict.seconds = round(time.process_time() - started, 2)
    return verdict


def build(family: Family, directory: Path) -> Paths:
    """Checkpoints of the target and of its drafter, and of what is to be compared with."""
    model = random_model(family.config(), family.model)
    reference = save(model, directory / "reference")
    perturb(model, NOISE, seed=1)
    near = save(model, directory / "near")
    perturb(model, NOISE, seed=2)
    far, target = save(model, directory / "far"), reference
    if family.inside:
        target = put_inside(reference, directory / "target", family.composite())
    return Paths(far, near, target, reference)


def _serve(family: Family, paths: Paths, is_thorough: bool, verdict: Verdict) -> None:
    settings = settings_of(paths)
    verdict.before_weights = True
    try:
        ModelPool.from_config(settings["pool"])
        verdict.before_weights = False
        with ChainRouter.from_config(settings) as router:
            verdict.before_weights = None
            check(family, paths.reference, router, is_thorough, verdict)
            assert_whole(router)
    except ConfigError as error:
        verdict.status, verdict.reason = "refused", error.reason
    except NoTextError as error:
        verdict.status, verdict.reason = "not built", str(error)
    except Exception as error:  # a traceback is what this check looks for
        verdict.status = "FAULT"
        at = traceback.extract_tb(error.__traceback__)[-1]
        verdict.reason = f"{_told(error)} ({Path(at.filename).name}:{at.lineno})"


def settings_of(paths: Paths) -> dict[str, Any]:
    members = {"far": paths.far, "near": paths.near, "target": paths.target}
    length = max(LENGTHS) + 2 * NEW_TOKENS
    engine = {"max_requests": ROWS, "max_model_len": length, "prefill_chunk": PREFILL_CHUNK}
    return {"pool": pool_settings(members), "engine": engine | {"preload": False}}


def check(
    family: Family, path: Path, router: ChainRouter, is_thorough: bool, verdict: Verdict
) -> None:
    """Fills the verdict on a family that is served."""
    reference = load(path, family.model)
    try:
        generated(reference, (1, 2, 3), count=1)
    except Exception as error:  # whatever a class's own code raises
        raise NoTextError(f"it is served, but cannot write by itself: {_told(error)}") from error
    longest = router.pool.longest_sequence - NEW_TOKENS
    prompts = prompts_of([min(length, longest) for length in LENGTHS], VOCAB_SIZE)
    texts, verdict.reason = references(router, reference, prompts)
    verdict.distinct = len({token for text in texts.values() for token in text})
    verdict.depends = forgetting(reference, prompts[-1], texts[prompts[-1]], WINDOW)
    served = Served(router, texts)
    served.check("off, batch of 4", prompts)
    served.check("width 3, batch of 4", prompts, Speculation(CHAIN, DEPTH, WIDTHS[-1]))
    if is_thorough:
        check_all(served, prompts)
        check_company(served, prompts, reference)
        check_prefixes(served, prompts[-1], reference)
    faults = {
        name: count
        for name, count in router.instruments.engine_state().control_faults.items()
        if count
    }
    if faults:
        raise RuntimeError(f"faults of the router's policies: {faults}")
    verdict.accepted, verdict.checks = served.accepted, served.checks
    if served.differences:
        verdict.status, verdict.reason = "WRONG", "; ".join(served.differences[:3])
    elif not served.accepted:
        raise RuntimeError("no draft was accepted")


def references(
    router: ChainRouter, reference: Any, prompts: Sequence[Tokens]
) -> tuple[dict[Tokens, Tokens], str]:
    """What `generate` says. Some classes drop their cache or fill it wrongly: where the router says
    otherwise, it is what `generate` says without one, and a remark."""
    texts = {prompt: generated(reference, prompt, NEW_TOKENS) for prompt in prompts}
    outputs = router.generate(list(prompts), GREEDY, "off")
    if [tuple(output.token_ids) for output in outputs] == list(texts.values()):
        return texts, ""
    plain = {each: generated(reference, each, NEW_TOKENS, use_cache=False) for each in prompts}
    return plain, "" if plain == texts else "generate says otherwise with its cache"


def check_all(served: Served, prompts: Sequence[Tokens]) -> None:
    """One by one and in chains, and seeded sampling with and without drafts."""
    served.check("off, alone", prompts, together=False)
    chain, tree = (Speculation(CHAIN, DEPTH, width) for width in WIDTHS)
    served.check("width 1, batch of 4", prompts, chain)
    served.check("width 3, alone", prompts, tree, together=False)
    params = replace(GREEDY, temperature=0.8, seed=7)
    wanted = [tuple(each.token_ids) for each in served.outputs(prompts, params, "off")]
    served.compare("sampled, width 3", served.outputs(prompts, params, tree), wanted)


def check_company(served: Served, prompts: Sequence[Tokens], reference: Any) -> None:
    """Three models, sixteen rows, rows that are taken, and texts that another replica began."""
    served.check("chain of three", prompts, Speculation(("far", *CHAIN), DEPTH, WIDTHS[-1]))
    tree = Speculation(CHAIN, DEPTH, WIDTHS[-1])
    lengths = [len(prompt) // 2 + 3 for prompt in prompts] * (ROWS // len(prompts) - 1)
    others = prompts_of(lengths, VOCAB_SIZE, seed=2)
    served.texts |= references(served.router, reference, others)[0]
    served.check("width 3, batch of 16", [*prompts, *others], tree)
    with preempting_router(served.router, PREEMPTED) as disturbed:
        served.check("width 3, preempted", [*prompts, *others], tree)
    if not disturbed.count:
        raise RuntimeError("no row was taken")
    handles = [
        served.router.submit(prompt, GREEDY, tree, generated=served.texts[prompt][:HANDED])
        for prompt in prompts
    ]
    wanted = [served.texts[prompt] for prompt in prompts]
    served.compare("begun by another", [handle.result() for handle in handles], wanted)


def check_prefixes(served: Served, prompt: Tokens, reference: Any) -> None:
    """A request that goes on where another one's prompt was left, without drafts and with them."""
    params = replace(GREEDY, prefix_cache=True)
    begun = prompt[: len(prompt) * 3 // 4]
    others = [(*begun, *more) for more in prompts_of((6, 9), VOCAB_SIZE, seed=1)]
    drafted = Speculation(CHAIN, DEPTH, WIDTHS[-1])
    served.outputs([prompt, begun], params, drafted)  # recurrent states are kept where one ends
    asked: tuple[SpeculationOverride, ...] = ("off", drafted)
    for other, speculation in zip(others, asked, strict=True):
        wanted = generated(reference, other, NEW_TOKENS)
        [output] = served.outputs([other], params, speculation)
        served.compare("after a kept prefix", [output], [wanted])
        if not output.metrics.cached_tokens:
            raise RuntimeError("no prefix was taken over")


def _told(error: Exception) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}"[:300]


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Classes warn of what does not matter here; models are timed into a cache of their own, and
    briefly: chains are asked for by name."""
    with tempfile.TemporaryDirectory() as cache, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        told: Any = transformers.logging
        verbosity = told.get_verbosity()
        told.set_verbosity_error()
        try:
            with (
                mock.patch.dict(os.environ, SPECROUTER_CACHE=cache),
                mock.patch.object(model_times, "profile_model", BRIEFLY),
            ):
                yield
        finally:
            told.set_verbosity(verbosity)


def families_of(names: Sequence[str], classes: str) -> list[tuple[Family, bool]]:
    """Those asked for, and whether each gets every check. Classes of named ones are not swept."""
    every = [(family, True) for family in NAMED]
    if classes == "all":
        every += [(family, False) for family in swept()]
    unknown = set(names) - {family.name for family, _ in every}
    if unknown:
        raise SystemExit(f"no family {', '.join(sorted(unknown))}")
    if names:
        return [(family, whole) for family, whole in every if family.name in names]
    kinds = {family.inside or family.kind for family in NAMED if family.expected == "exact"}
    return [(family, whole) for family, whole in every if whole or family.name not in kinds]


def run(asked: Sequence[tuple[Family, bool]]) -> list[Verdict]:
    progress, verdicts = Progress("families", len(asked)), []
    with quiet():
        for family, is_thorough in asked:
            verdicts.append(judge(family, is_thorough))
            progress(f"{family.name} {verdicts[-1].status}")
    return verdicts


def table_of(verdicts: Sequence[Verdict]) -> str:
    lines = []
    for one in sorted(verdicts, key=lambda each: (each.status, each.name)):
        early = {True: "before weights", False: "after weights", None: ""}[one.before_weights]
        figures = (
            f"{one.checks} checks, {one.accepted} accepted, {one.distinct} distinct, "
            f"{one.depends} depend"
        )
        told = f"{figures if one.status == 'exact' else early} {one.reason}".strip()
        lines.append(f"{one.status:<10} {one.name:<28} {one.seconds:5.1f} s  {told}")
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    parser = make_parser(__doc__, threads=1)
    parser.add_argument("names", nargs="*", metavar="NAME", help="only these")
    parser.add_argument("--classes", choices=("all", "named"), default="all")
    given = parser.parse_args(arguments)
    prepare(given.threads)
    started = time.monotonic()
    verdicts = run(families_of(given.names, given.classes))
    counts = Counter(one.status for one in verdicts)
    expected = {family.name: family.expected for family in NAMED}
    others = [one.name for one in verdicts if one.status != expected.get(one.name, one.status)]
    print(table_of(verdicts))
    print(", ".join(f"{count} {status}" for status, count in sorted(counts.items())))
    print(f"not as expected: {', '.join(others) or 'none'}")
    passed = not (others or counts["WRONG"] or counts["FAULT"])
    every = [asdict(one) for one in verdicts]
    figures = {"counts": counts, "not_as_expected": others, "families": every}
    return finish("families", passed, started, figures)


if __name__ == "__main__":
    sys.exit(main())
