"""Trains the bundled family: `python -m research.train_family.train --data DIR --work DIR`.

Stages, each a share of the wall-clock budget `--minutes`:

1. `together`: the target learns from the text; the smaller generalists learn from the target's
   current distribution on the same batch. The teacher's forward is paid for once, and the
   students follow it to the end of its learning-rate schedule.
2. one stage per student, the target standing still: each learns its final distribution, half
   on the text, half on what the target itself goes on with after some of it (`own_text.py`),
   since that is what a drafter meets when it serves. Total variation joins the loss, since it is
   what acceptance depends on. The specialists begin as copies of the smallest generalist and
   learn on one domain.

Schedules follow the wall clock, so a slow machine trains less, not longer. The run keeps a
checkpoint and goes on from it; at the end it writes `WORK/models/<name>` in bfloat16.
Not here: evaluation (`card.py`).
"""

import argparse
import logging
from pathlib import Path

from research.train_family.corpus import load_corpus
from research.train_family.family import MIDDLE, SMALL, SPECIALISTS
from research.train_family.own_text import WINDOW
from research.train_family.trainer import Stage, Trainer


def make_stages(minutes: float) -> list[Stage]:
    def frozen(name: str, share: float, domain: str | None = None) -> Stage:
        return Stage(
            name=name,
            minutes=share * minutes,
            students=(name,),
            teacher_learns=False,
            window=WINDOW - 1,
            domain=domain,
        )

    return [
        Stage(
            name="together",
            minutes=0.6 * minutes,
            students=(MIDDLE, SMALL),
            teacher_learns=True,
            window=256,
        ),
        frozen(SMALL, 0.15),
        *(frozen(name, 0.07, domain) for name, domain in SPECIALISTS.items()),
        frozen(MIDDLE, 0.11),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--data", type=Path, required=True, help="folder with the training text")
    parser.add_argument("--work", type=Path, required=True, help="checkpoints and results")
    parser.add_argument("--minutes", type=float, default=75.0, help="wall-clock budget")
    parser.add_argument("--batch-tokens", type=int, default=4096)
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    args.work.mkdir(parents=True, exist_ok=True)
    corpus = load_corpus(args.data, args.work)
    trainer = Trainer(corpus, args.work, make_stages(args.minutes), args.batch_tokens)
    trainer.run()
    trainer.export()


if __name__ == "__main__":
    main()
