"""What `specrouter generate` does: continues one prompt, and says how fast."""

from __future__ import annotations

import argparse
import sys
from typing import Any, Literal

import specrouter
from specrouter import RequestError, RequestOutput, SamplingParams, Speculation
from specrouter.config import RouterConfig
from specrouter.progress import Progress, ShownLoad
from specrouter.request.objective import check_positive, joined

_SHAPE = ("depth", "width")  # arguments that go with a chain
_SLO_OPTIONS = {
    "tpot_ms": "--slo-tpot-ms",
    "ttft_ms": "--slo-ttft-ms",
    "e2e_ms": "--slo-e2e-ms",
}


def generate_text(arguments: argparse.Namespace) -> int:
    """Returns the exit code. Raises `ConfigError`, `RequestError`."""
    # All that is wrong with the arguments, before PyTorch is imported and models are loaded.
    params, times_ms = _sampling_params(arguments), _slo_times(arguments)
    speculation = _speculation(arguments)
    output: RequestOutput | None = None
    config = _for_one_request(RouterConfig.load(arguments.config), arguments)
    if arguments.fresh_times:
        config = config.with_fresh_times()
    with Progress() as progress:
        started = specrouter.ChainRouter.from_config(config, ShownLoad(progress))
    with started as router:
        slo = joined(arguments.slo_class, times_ms, router.slo_classes, _SLO_OPTIONS)
        for delta in router.stream(arguments.prompt, params, speculation, slo):
            print(delta.text, end="", flush=True)
            output = delta.output
    print(flush=True)
    assert output is not None, "the last delta has it"
    print(_figures(output), file=sys.stderr)
    if output.error is not None:
        print(f"specrouter: generation failed: {output.error}", file=sys.stderr)
        return 1
    return 0


def _for_one_request(config: RouterConfig, arguments: argparse.Namespace) -> RouterConfig:
    """What the request will not use is not loaded before it."""
    names = {model.name for model in config.pool.models}
    if arguments.no_speculation:
        change: dict[str, Any] = {"policy": "target-only", "chain": None}
    elif arguments.chain is not None and names.issuperset(arguments.chain):
        change = {"policy": "static", "chain": arguments.chain}
    else:  # also for a chain of unknown models, which the router refuses
        return config
    scheduler = config.scheduler.model_copy(update=change)
    return config.model_copy(update={"scheduler": scheduler})


def _sampling_params(arguments: argparse.Namespace) -> SamplingParams:
    names = ("max_new_tokens", "temperature", "top_k", "top_p", "seed")
    given: dict[str, Any] = {name: getattr(arguments, name) for name in names}
    given["stop"] = tuple(arguments.stop)
    return SamplingParams(**{name: value for name, value in given.items() if value is not None})


def _speculation(arguments: argparse.Namespace) -> Speculation | Literal["off"] | None:
    if arguments.no_speculation:
        for name in _SHAPE:
            if getattr(arguments, name) is not None:
                option = f"--{name.replace('_', '-')}"
                raise RequestError(option, "means nothing with --no-speculation")
        return "off"
    shape = {name: getattr(arguments, name) for name in _SHAPE}
    if arguments.chain is None and all(value is None for value in shape.values()):
        return None
    return Speculation(chain=arguments.chain, **shape)


def _slo_times(arguments: argparse.Namespace) -> dict[str, float]:
    given = {name: getattr(arguments, f"slo_{name}") for name in _SLO_OPTIONS}
    times_ms = {name: value for name, value in given.items() if value is not None}
    for name, value in times_ms.items():
        check_positive(_SLO_OPTIONS[name], value)
    return times_ms


def _figures(output: RequestOutput) -> str:
    """One line: `64 tokens (length) | 310.2 tokens/s | ttft 41 ms | ...`."""
    metrics = output.metrics
    parts = [f"{metrics.output_tokens} tokens ({output.finish_reason})"]
    if metrics.ttft_ms is not None:
        decode_ms = (metrics.tpot_ms or 0.0) * max(metrics.output_tokens - 1, 0)
        rate = metrics.output_tokens / (metrics.ttft_ms + decode_ms) * 1000
        parts += [f"{rate:.1f} tokens/s", f"ttft {metrics.ttft_ms:.0f} ms"]
    if metrics.acceptance_length is not None:
        parts.append(f"acceptance length {metrics.acceptance_length:.2f}")
    if metrics.chains:
        parts.append(_chain_shares(metrics.chains))
    if metrics.attained is not None:
        parts.append("objective attained" if metrics.attained else "objective missed")
    return " | ".join([*parts, f"seed {output.seed}"])


def _chain_shares(chains: dict[tuple[str, ...], int]) -> str:
    """Each chain's share of the cycles, the most used first."""
    cycles = sum(chains.values())
    ordered = sorted(chains.items(), key=lambda item: -item[1])
    return ", ".join(f"{'>'.join(chain)} {count / cycles:.0%}" for chain, count in ordered)
