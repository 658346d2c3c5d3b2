"""Proof that a change of the decision code loses nothing: recorded decisions, decided again.

A *recording* is what an engine told its profiler in a real run, and every question that it asked
its scheduler. `python -m research.replay` (`make replay`) feeds the recordings in `recordings/` to
the code of this tree and compares its answers with the recorded ones;
`python -m research.replay digest` does the same for policies in simulated time.

- `facts`, `recording`: what is recorded, and the files.
- `adapter`: the only file that knows the project's decision classes. Who renames or redesigns these
  changes that file and no other.
- `compare`: same chain, same route, regret.
- `digest`, with `simulation` in the place of `adapter`, `stretches` and `machines.json`: simulated
  time.

A recording does not name a class of the project, so it outlives them, and what recorded it: that is
in git's history before 2026-11-25 (`checks/replay/record.py`).
"""
