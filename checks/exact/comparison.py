"""Requests served under an arrangement, token by token against their references.

Contract: after the first difference of a request nothing that follows can be compared, so the
request is resumed from its reference, the differing token included ("teacher forcing"), until
all positions are judged. Every position is compared exactly once.
"""

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

from checks.exact.arrangement import Arrangement
from specrouter import ChainRouter, RequestOutput, SamplingParams

Tokens = tuple[int, ...]
ALONE = Arrangement(mode="off", batch=1)


@dataclass(frozen=True)
class Case:
    """A request and what it must say."""

    prompt: Tokens
    params: SamplingParams
    reference: Tokens


@dataclass(frozen=True)
class Divergence:
    """`got` is None where the output ended before the reference."""

    case: Case
    arrangement: Arrangement
    position: int
    got: int | None

    @property
    def prefix(self) -> Tokens:
        return self.case.reference[: self.position]

    @property
    def expected(self) -> int | None:
        """None where the output went on after the reference's end."""
        rest = self.case.reference[self.position :]
        return rest[0] if rest else None


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """One arrangement's result. `cycles` of chains longer than one are `speculated`.

    `attained`: requests with an objective that attained it, and those that did not. `cached`:
    prompt tokens that were taken over from other requests.
    """

    arrangement: Arrangement
    tokens: int
    divergences: tuple[Divergence, ...]
    cycles: int
    speculated: int
    attained: tuple[int, int] = (0, 0)
    cached: int = 0


@dataclass(frozen=True)
class _Judged:
    tokens: int
    divergences: tuple[Divergence, ...]
    outputs: tuple[RequestOutput, ...]


def compare(
    router: ChainRouter,
    cases: Sequence[Case],
    arrangement: Arrangement,
    on_done: Callable[[], None] = lambda: None,
    which: Sequence[int] | None = None,
) -> Comparison:
    """Keeps `arrangement.batch` requests in flight until all cases are judged.

    `which`: indices of the cases that are; None: all.
    """

    def judge_one(index: int) -> _Judged:
        judged = _judge(router, cases[index], arrangement, index)
        on_done()
        return judged

    with arrangement.routing(router), ThreadPoolExecutor(arrangement.batch) as clients:
        results = list(clients.map(judge_one, range(len(cases)) if which is None else which))
    metrics = [output.metrics for result in results for output in result.outputs]
    chains = [(chain, cycles) for each in metrics for chain, cycles in each.chains.items()]
    in_time = [each.attained for each in metrics]
    return Comparison(
        arrangement=arrangement,
        tokens=sum(result.tokens for result in results),
        divergences=tuple(d for result in results for d in result.divergences),
        cycles=sum(cycles for _, cycles in chains),
        speculated=sum(cycles for chain, cycles in chains if len(chain) > 1),
        attained=(in_time.count(True), in_time.count(False)),
        cached=sum(each.cached_tokens for each in metrics),
    )


def first_difference(got: Sequence[int], expected: Sequence[int]) -> int | None:
    """Where two token sequences part; the length of the shorter where it is a prefix."""
    for position, (one, other) in enumerate(zip(got, expected, strict=False)):
        if one != other:
            return position
    return None if len(got) == len(expected) else min(len(got), len(expected))


def _judge(router: ChainRouter, case: Case, arrangement: Arrangement, index: int) -> _Judged:
    divergences = list[Divergence]()
    outputs = list[RequestOutput]()
    prefix: Tokens = ()
    tokens = 0
    while True:
        output = resume(router, case, prefix, arrangement, index)
        outputs.append(output)
        got = output.token_ids
        difference = first_difference(got, case.reference)
        if difference is None:
            tokens += len(got) - len(prefix)
            break
        assert difference >= len(prefix), "the output does not keep the tokens it was given"
        tokens += difference + 1 - len(prefix)
        wrong = got[difference] if difference < len(got) else None
        divergences.append(Divergence(case, arrangement, difference, wrong))
        prefix = case.reference[: difference + 1]
        if difference + 1 >= len(case.reference):
            break
    return _Judged(tokens, tuple(divergences), tuple(outputs))


def resume(
    router: ChainRouter, case: Case, prefix: Tokens, arrangement: Arrangement, index: int = 0
) -> RequestOutput:
    """The output of a case that goes on after `prefix`; its tokens include the prefix.

    `index`: by which the arrangement asks for something else. The router stays under its policy.
    """
    speculation, slo = arrangement.speculation_of(index), arrangement.slo_of(index)
    params = replace(case.params, prefix_cache=arrangement.cached)
    handle = router.submit(case.prompt, params, speculation=speculation, generated=prefix, slo=slo)
    output = handle.result(timeout=600)
    if output.error is not None or output.finish_reason == "cancelled":
        raise RuntimeError(
            f"{arrangement}, {speculation}, {slo}: request ended with {output.error}"
        )
    return output


def own_case(router: ChainRouter, prompt: Tokens, params: SamplingParams) -> Case:
    """A request and what the router says to it alone, with speculation off."""
    alone = resume(router, Case(prompt, params, ()), (), ALONE)
    return Case(prompt, params, tuple(alone.token_ids))


def all_divergences(comparisons: Iterable[Comparison]) -> list[Divergence]:
    return [divergence for comparison in comparisons for divergence in comparison.divergences]
