"""Plot of the token times that the router predicted for each chain when it last compared some.

    python -m examples.decision_plot --plot FILE.png [--config FILE] [--prompt TEXT]

It generates some text, takes the last decision that compared alternatives, and draws the predicted
time of a token for the best shape of each chain, the chosen one and the others. Needs matplotlib.
"""

import argparse
from pathlib import Path

from specrouter import ChainRouter, SamplingParams
from specrouter.cli.arguments import default_config
from specrouter.cycle import Option
from specrouter.routing.decision_record import DecisionRecord


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--config", type=Path, default=default_config(), help="a YAML scenario")
    parser.add_argument("--plot", type=Path, required=True, metavar="FILE.png")
    parser.add_argument("--prompt", default="def fib(n):", help="default: %(default)s")
    parser.add_argument("--new-tokens", type=int, default=96, help="default: %(default)s")
    options = parser.parse_args(arguments)
    params = SamplingParams(
        max_new_tokens=options.new_tokens, temperature=1.0, seed=1, ignore_eos=True
    )
    with ChainRouter.from_config(options.config) as router:
        router.generate(options.prompt, params)
        compared = [one for one in router.instruments.decisions() if one.decision.alternatives]
    if not compared:
        raise SystemExit(
            "no decision compared alternatives: the pool needs drafters, and a policy "
            "that chooses, such as adaptive"
        )
    record = compared[-1]
    draw(record, options.plot)
    print(f"cycle {record.cycle}: {record.decision.reason}")


def best_of_each_chain(record: DecisionRecord) -> list[Option]:
    """Return the alternative with the least time per token of each chain, fastest first."""
    known = list(record.decision.alternatives)
    if record.decision.predicted is not None:
        known.append(record.decision.predicted)
    best: dict[tuple[str, ...], Option] = {}
    for option in sorted(known, key=lambda option: option.ms_per_token):
        best.setdefault(option.chain, option)
    return list(best.values())


def draw(record: DecisionRecord, file: Path) -> None:
    from matplotlib.figure import Figure

    options = best_of_each_chain(record)
    chosen = record.decision.chain
    figure = Figure(figsize=(8, 0.9 + 0.45 * len(options)), layout="constrained")
    axes = figure.add_subplot()
    bars = axes.barh(
        [_label(option) for option in options],
        [option.ms_per_token for option in options],
        color=["#2a9d8f" if option.chain == chosen else "#b8c4ce" for option in options],
    )
    labels = [
        f"{option.ms_per_token:.1f} ms{', chosen' if option.chain == chosen else ''}"
        for option in options
    ]
    axes.bar_label(bars, labels, padding=3)
    axes.invert_yaxis()
    axes.margins(x=0.12)
    axes.set_xlabel("predicted milliseconds per token (lower is better)")
    axes.set_title(f"cycle {record.cycle}, requests: {record.requests}", loc="left", fontsize=10)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(file, dpi=120)


def _label(option: Option) -> str:
    shape, chain = option.shape, " > ".join(option.chain)
    return chain if not shape.depth else f"{chain}\n{shape.depth} deep, {shape.width} wide"


if __name__ == "__main__":
    main()
