"""Recorded outputs, to be replayed: prompts with what was answered to them.

Contract: a part is a file, or one of the built-in agent workload's. A recorded output is what
every contender says, up to a number of tokens.
"""

import hashlib
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from modelpool.errors import ConfigError
from specrouter.bench.prompts import BenchPrompt, Tokenizer, read_entries


@dataclass(frozen=True)
class Trajectory:
    """A prompt, and what was answered to it."""

    prompt: str
    output: str


Trajectories = Mapping[str, Sequence[Trajectory]]  # by part


def load_trajectories(files: Sequence[Path]) -> Trajectories:
    """Of JSON lines with `prompt` and `output`. Raises `ConfigError` for what has none."""
    found: dict[str, list[Trajectory]] = {}
    for file in files:
        of_file = [_trajectory(where, entry) for where, entry in read_entries(file)]
        found.setdefault(file.stem, []).extend(of_file)
    return found


def tokenize_trajectories(
    trajectories: Trajectories, tokenizer: Tokenizer, limit: int, new_tokens: int
) -> dict[str, list[BenchPrompt]]:
    """By part; outputs are cut to `new_tokens`. What is longer than `limit` with its output is
    left out: a prompt cut from the left would no longer hold what is quoted.

    Raises `ConfigError` for a part of which nothing is left.
    """
    prompts: dict[str, list[BenchPrompt]] = {}
    for part, found in trajectories.items():
        whole = [_prompt(part, one, tokenizer, new_tokens) for one in found]
        prompts[part] = [p for p in whole if len(p.token_ids) + len(p.recorded) <= limit]
        if not prompts[part]:
            reason = f"no recorded text of {part!r} fits {limit} tokens with its prompt"
            raise ConfigError("--workload", reason)
    return prompts


def fingerprint(trajectories: Trajectories) -> dict[str, Any]:
    """What figures of recorded texts are comparable by."""
    digest = hashlib.sha256()
    for part, found in trajectories.items():
        for one in found:
            digest.update("\0".join((part, one.prompt, one.output, "")).encode())
    return {
        "sha256": digest.hexdigest()[:16],
        "python": platform.python_version(),
        "is_recorded": True,
    }


def _prompt(part: str, one: Trajectory, tokenizer: Tokenizer, new_tokens: int) -> BenchPrompt:
    prompt, output = (tuple(tokenizer(text)["input_ids"]) for text in (one.prompt, one.output))
    return BenchPrompt(part, one.prompt, prompt, output[:new_tokens])


def _trajectory(where: str, entry: Any) -> Trajectory:
    texts = [entry.get(name) if isinstance(entry, dict) else None for name in ("prompt", "output")]
    if not all(isinstance(text, str) and text for text in texts):
        raise ConfigError(
            "--prompts", f"{where} has no prompt and output, as --workload agent needs"
        )
    return Trajectory(*map(str, texts))
