"""Released models give the same text however a request is served: not one of its tokens differs.

    python -m checks.real.same_text [FOLDER] --out DIR [--only MODEL,...] [--quick]

Every model is served as `specrouter serve FILE --draft DRAFTER` would, greedy and by two seeds, in
every arrangement of `test_support.arrangements`; texts are compared with those of each request
alone, whole and without drafts. A result is a line of `DIR/results.jsonl`, and is not measured
again while the code stays as it is. Fails if a text differs, or an arrangement did not come about.
"""

import argparse
import hashlib
import itertools
import json
import os
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from checks.exact.report import conditions
from checks.real.files import find
from checks.real.prompts import chats
from specrouter import LLM, ChainRouter, SamplingParams
from specrouter.request.chat_template import ChatTemplate
from test_support.arrangements import ARRANGEMENTS, REFERENCE, Arrangement, Asked, serve

ROOT = Path(__file__).parents[2]
_CODE = ("specrouter", "processors", "statemgr", "modelpool", "checks/real")
_SWITCHES = ("ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA", "SPECROUTER_KERNEL", "OMP_NUM_THREADS")


@dataclass(frozen=True)
class Model:
    """A file, its drafters, which may be files, too, and how many chats it is sent."""

    file: str
    drafters: tuple[str, ...]
    chats: int


MODELS: Mapping[str, Model] = {
    "smollm2": Model("smollm2", ("suffix", "ngram"), 100),
    "qwen-0.5b": Model("qwen-0.5b", ("suffix", "ngram"), 20),
    "qwen-pair": Model("qwen-1.5b", ("qwen-0.5b", "suffix"), 6),
    "gemma3": Model("gemma3", ("suffix", "ngram"), 20),
}
DEFAULT = ("smollm2", "qwen-0.5b", "qwen-pair")  # Gemma is no chat model, and has its own terms
MODES: Mapping[str, SamplingParams] = {
    "greedy": SamplingParams(),
    "seed 1": SamplingParams(temperature=0.8, seed=1000),
    "seed 2": SamplingParams(temperature=0.8, seed=2000),
}
NEW_TOKENS = 48
QUICK_CHATS = 12


@dataclass(frozen=True, kw_only=True)
class Key:
    """Of a result. `drafter`: empty for the reference; `build`: of the code and the machine."""

    model: str
    drafter: str
    mode: str
    arrangement: str
    chats: int
    build: str


@dataclass(frozen=True, kw_only=True)
class Result:
    """`differing`: numbers of chats; `texts`: of the reference alone."""

    key: Key
    differing: list[int]
    missing: list[str]
    signs: dict[str, int]
    seconds: float
    texts: list[list[int]]

    @property
    def failed(self) -> bool:
        return bool(self.differing or self.missing)


class Results:
    """Those of a file, to which new ones are added."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._file = folder / "results.jsonl"
        self._known = {one.key: one for one in self._read()}

    def __contains__(self, key: Key) -> bool:
        return key in self._known

    def __getitem__(self, key: Key) -> Result:
        return self._known[key]

    def add(self, result: Result) -> None:
        self._known[result.key] = result
        with self._file.open("a", encoding="utf-8") as stream:
            stream.write(f"\n{json.dumps(asdict(result))}\n")  # the last one may be cut

    def _read(self) -> Iterator[Result]:
        lines = self._file.read_text(encoding="utf-8").splitlines() if self._file.exists() else ()
        for line in lines:
            try:
                fields: dict[str, Any] = json.loads(line)
            except ValueError:  # empty, or the process ended while it was written
                continue
            yield Result(**fields | {"key": Key(**fields["key"])})


@dataclass(frozen=True)
class Check:
    """One model with one drafter."""

    name: str
    drafter: str
    count: int
    build: str
    results: Results

    def key(self, mode: str, arrangement: Arrangement) -> Key:
        drafter = "" if arrangement == REFERENCE else self.drafter
        return Key(
            model=self.name,
            drafter=drafter,
            mode=mode,
            arrangement=arrangement.name,
            chats=self.count,
            build=self.build,
        )

    @property
    def keys(self) -> list[Key]:
        every = itertools.product(MODES, (REFERENCE, *ARRANGEMENTS))
        return [self.key(mode, arrangement) for mode, arrangement in every]

    def run(self, folder: Path | None) -> None:
        if all(key in self.results for key in self.keys):
            return
        model = MODELS[self.name]
        drafter = (
            self.drafter if self.drafter in ("suffix", "ngram") else find(self.drafter, folder)
        )
        started = time.monotonic()
        with LLM(find(model.file, folder), draft=str(drafter)) as llm:
            _say(f"{self.name} with {self.drafter}: started in {time.monotonic() - started:.0f} s")
            for mode, params in MODES.items():
                self._serve(llm.router, mode, params)
            llm.router.instruments.check_integrity()

    def _serve(self, router: ChainRouter, mode: str, params: SamplingParams) -> None:
        asked = _asked(router, self.count, params)
        for arrangement in (REFERENCE, *ARRANGEMENTS):
            key = self.key(mode, arrangement)
            if key in self.results:
                continue
            started = time.monotonic()
            served = serve(router, asked, arrangement)
            texts = served.texts
            if arrangement != REFERENCE:
                texts = tuple(map(tuple, self.results[self.key(mode, REFERENCE)].texts))
            missing = served.missing(arrangement)
            if arrangement.drafts == "routed":
                # The router need not use what does not pay on this machine.
                missing = [sign for sign in missing if sign != "accepted"]
            result = Result(
                key=key,
                differing=served.differing(texts),
                missing=list(missing),
                signs={str(name): count for name, count in served.signs.items()},
                seconds=round(time.monotonic() - started, 1),
                texts=list(map(list, texts)) if arrangement == REFERENCE else [],
            )
            self.results.add(result)
            _say(_line(result))


def _asked(router: ChainRouter, count: int, params: SamplingParams) -> list[Asked]:
    """Each with a seed of its own."""
    template = ChatTemplate(router.tokenizer, None)
    every = list(chats())
    chosen = every if count == len(every) else every[:: len(every) // count - 1][:count]
    prompts = [tuple(template.prompt([{"role": "user", "content": one}])) for one in chosen]
    first = params.seed or 0
    return [
        Asked(prompt, replace(params, max_new_tokens=NEW_TOKENS, seed=first + number))
        for number, prompt in enumerate(prompts)
    ]


def _build() -> str:
    """Changes with the code, and with what of the machine chooses the kernels."""
    digest = hashlib.sha256()
    for folder in _CODE:
        for file in sorted((ROOT / folder).rglob("*.*")):
            if file.suffix in (".py", ".c", ".h"):
                digest.update(file.read_bytes())
    machine = [torch.__version__, torch.backends.cpu.get_cpu_capability()]
    machine += [os.environ.get(name, "") for name in _SWITCHES]
    digest.update(" ".join(machine).encode())
    return digest.hexdigest()[:12]


def _line(result: Result) -> str:
    """Of the table, and told when it is there."""
    key, signs = result.key, result.signs
    name = f"{key.model:9} {key.drafter:9} {key.mode:6} {key.arrangement:9}"
    seen = " ".join(f"{sign} {count}" for sign, count in signs.items() if count)
    missing = f"; NOT SEEN: {', '.join(result.missing)}" if result.missing else ""
    differing = f"{len(result.differing):3} of {key.chats} differ"
    return f"{name} {differing}, {result.seconds:5.0f} s; {seen}{missing}"


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("folder", nargs="?", type=Path, help="with files that need no download")
    parser.add_argument("--out", type=Path, required=True, help="where results are kept")
    parser.add_argument("--only", default=",".join(DEFAULT), help=f"of {', '.join(MODELS)}")
    parser.add_argument("--quick", action="store_true", help=f"{QUICK_CHATS} chats at most")
    given = parser.parse_args(arguments)
    names = given.only.split(",")
    for name in names:
        if name not in MODELS:
            parser.error(f"{name} is none of {', '.join(MODELS)}")
    results, build = Results(given.out), _build()
    checks = list[Check]()
    for name in names:
        count = min(MODELS[name].chats, QUICK_CHATS) if given.quick else MODELS[name].chats
        checks += [Check(name, one, count, build, results) for one in MODELS[name].drafters]
    for check in checks:
        check.run(given.folder)
    found = [results[key] for key in dict.fromkeys(key for one in checks for key in one.keys)]
    print("\n".join(map(_line, found)))
    failed = sum(one.failed for one in found)
    print(json.dumps({"failed": failed, "of": len(found), "conditions": conditions()}))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
