"""The fast lane: ruff, mypy with its cache, and the pure tests, in a minute or so (`make fast`).

    python -m tests.fast_lane [OPTIONS OF PYTEST]

Prints what each step took, and which tests took longest. The first step that fails ends it.
"""

import subprocess
import sys
import time

STEPS = {
    "ruff check": ("ruff", "check", "."),
    "ruff format": ("ruff", "format", "--check", "."),
    "mypy": ("mypy",),
    "pure tests": ("pytest", "-q", "--fast", "--durations=10", "--durations-min=0.5"),
}


def main(options: list[str]) -> int:
    taken: dict[str, float] = {}
    code = 0
    for name, command in STEPS.items():
        own = options if command[0] == "pytest" else []
        started = time.monotonic()
        code = subprocess.run([sys.executable, "-m", *command, *own], check=False).returncode
        taken[name] = time.monotonic() - started
        if code:
            print(f"{name} failed", file=sys.stderr)
            break
    times = ", ".join(f"{name} {seconds:.0f} s" for name, seconds in taken.items())
    print(f"{sum(taken.values()):.0f} s: {times}")
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
