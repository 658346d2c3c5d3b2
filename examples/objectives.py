"""Two kinds of requests at once, each with its own objective: `python -m examples.objectives`.

Half of the requests are urgent, the other half is background work; there are more of them than can
run together. The urgent ones have the lower `priority` number, so they are admitted first. The
program prints for each class how many requests attained their objective, and their times.
Objectives are multiples of the time of a token when the target serves one request alone; make them
tighter (`--interactive 3`) or send more requests, and see which are served in time.
"""

import argparse
from pathlib import Path

from specrouter import ChainRouter, RouterConfig, SamplingParams
from specrouter.cli.arguments import default_config
from specrouter.config import SloConfig
from specrouter.engine.slo_accounts import Percentiles

CLASSES = ("interactive", "batch")
PROMPTS = ("def fib(n):", "The sea was", "Tom has 3 apples and buys 4 more.", "import json\n")


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--config", type=Path, default=default_config(), help="a YAML scenario")
    parser.add_argument("--interactive", type=float, default=8.0, help="default: %(default)s")
    parser.add_argument("--batch", type=float, default=20.0, help="default: %(default)s")
    parser.add_argument("--requests", type=int, default=16, help="default: %(default)s")
    parser.add_argument(
        "--rows", type=int, default=4, help="requests that run together (default: %(default)s)"
    )
    parser.add_argument("--new-tokens", type=int, default=48, help="default: %(default)s")
    options = parser.parse_args(arguments)
    classes = {name: SloConfig(tpot_ratio=getattr(options, name)) for name in CLASSES}
    config = RouterConfig.load(options.config)
    engine = config.engine.model_copy(update={"max_requests": options.rows})
    config = config.model_copy(update={"slo_classes": classes, "engine": engine})
    with ChainRouter.from_config(config) as router:
        handles = [
            router.submit(
                PROMPTS[i % len(PROMPTS)],
                SamplingParams(
                    max_new_tokens=options.new_tokens, temperature=1.0, seed=i, ignore_eos=True
                ),
                slo=CLASSES[i % 2],
                priority=i % 2,
            )
            for i in range(options.requests)
        ]
        for handle in handles:
            handle.result()
        report = router.instruments.slo_accounts.report()
    for name, figures in report.classes.items():
        print(
            f"{name:12s} {figures.attained} of {figures.judged} attained, "
            f"tpot {_shown(figures.tpot_ms)}, ttft {_shown(figures.ttft_ms)}"
        )
    total = report.total
    print(f"goodput {total.goodput_tokens_per_s:.0f} of {total.tokens_per_s:.0f} tokens/s")


def _shown(times: Percentiles | None) -> str:
    return "none" if times is None else f"p50 {times.p50:.0f} ms, p95 {times.p95:.0f} ms"


if __name__ == "__main__":
    main()
