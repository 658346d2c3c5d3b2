"""LLM: a model and its drafters in one line, for scripts and notebooks.

    from specrouter import LLM

    llm = LLM("Qwen/Qwen3-8B", draft="auto")  # LLM() has bundled models
    llm.chat("Why is the sky blue?")
    llm.compare("def fib(n):")

Contract: it serves what `specrouter serve` would serve with the same arguments. One LLM is open at
a time: a new one closes the old one before it loads models, so a notebook's cell can be run again.
It closes when the last reference to it, to its `router` or to one of its streams is gone, at the
latest when the interpreter ends. It needs no event loop, and works inside a running one. For two at
once, make two `ChainRouter`s.
"""

from __future__ import annotations

import gc
import secrets
import sys
import time
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from modelpool.errors import ConfigError
from specrouter.engine.request import PromptLike
from specrouter.notebook import PAIRS, Comparison, Text, Texts
from specrouter.progress import Progress, ShownLoad, is_live
from specrouter.request.errors import UnavailableError
from specrouter.request.output import Delta, RequestOutput
from specrouter.request.params import RequestError, SamplingParams, Speculation
from specrouter.request.spec import SpeculationOverride
from specrouter.target import OPTIONS, AskedTarget, Given, asked_of, naming

if TYPE_CHECKING:  # errors of the arguments come before PyTorch is imported
    from specrouter.router import ChainRouter

_SETTINGS = {option.name: option.setting for option in OPTIONS}
_SAMPLING = {*(one.name for one in fields(SamplingParams)), "max_tokens"}
_COMPARED_S = 20.0  # time of a comparison, which then ends at its next test
_open: weakref.ref[LLM] | None = None


class LLM:
    """A model with its drafters; see the module.

    Sampling parameters of the methods are those of `SamplingParams`, as keywords or as one object
    in `params`; `speculation` overrides the router's choice. Raises `ConfigError`, which names the
    argument.

    Args:
        target: as TARGET of `specrouter serve`; None: the bundled scenario.
        draft: names of drafters, as for `--draft`; "auto" finds one on this machine. `ngram`,
            which has no weights, is added unless a text drafter is named.
        set: any settings, by their keys in a configuration file: `{"engine.prefill_chunk": 512}`.
        progress: shows the progress of loading on stderr; None: on a terminal and in a notebook.
        options: `max_model_len`, `max_requests`, `generation_defaults`, `fresh_times`.
    """

    def __init__(
        self,
        target: str | Path | None = None,
        draft: str | Sequence[str] | None = None,
        *,
        set: Mapping[str, Any] | None = None,
        progress: bool | None = None,
        **options: Any,
    ) -> None:
        global _open
        asked = _asked(target, draft, set or {}, options)
        asked.check_sources()
        earlier = None if _open is None else _open()
        if earlier is not None:
            earlier.close()
        is_shown = is_live(sys.stderr) if progress is None else progress
        with naming(asked.arguments), Progress("starting") if is_shown else nullcontext() as shown:
            from specrouter.router import ChainRouter, close_when_dropped

            loading = None if shown is None else ShownLoad(shown)
            self._router: ChainRouter | None = ChainRouter(asked.config, loading)
        self._closing = close_when_dropped(self._router)
        _open = weakref.ref(self)

    @property
    def router(self) -> ChainRouter:
        """The router, for all other calls. Raises `UnavailableError` if this LLM is closed."""
        if self._router is None:
            raise UnavailableError("this LLM is closed; the next one that is made closes it")
        return self._router

    def generate(
        self,
        prompts: PromptLike | Sequence[PromptLike],
        params: SamplingParams | None = None,
        speculation: SpeculationOverride = None,
        **sampling: Any,
    ) -> Texts:
        """Return the texts in a list, also for one prompt; samples of a prompt are consecutive.

        Raises `RequestError`, which names the field.
        """
        outputs = self.router.generate(prompts, self._params(params, sampling), speculation)
        return Texts(map(_text, outputs))

    def chat(
        self,
        messages: str | Sequence[Mapping[str, Any]],
        params: SamplingParams | None = None,
        speculation: SpeculationOverride = None,
        **sampling: Any,
    ) -> Text:
        """Answer a message, or a conversation in OpenAI's format. Raises `RequestError`."""
        said = [{"role": "user", "content": messages}] if isinstance(messages, str) else messages
        return _text(self.router.chat(said, self._params(params, sampling), speculation))

    def stream(
        self,
        prompt: PromptLike,
        params: SamplingParams | None = None,
        speculation: SpeculationOverride = None,
        **sampling: Any,
    ) -> Iterator[Delta]:
        """Yield parts of the text as they come; leaving the loop cancels. Raises `RequestError`."""
        parts = self.router.stream(prompt, self._params(params, sampling), speculation)
        return self._held_while(parts)

    def compare(
        self, prompt: PromptLike, params: SamplingParams | None = None, **sampling: Any
    ) -> Comparison:
        """Serve one prompt with speculation and without, and compare texts and speeds.

        Both use the same seed, and neither can reuse what was kept of the other. Each is served
        once untimed, then in pairs of random order: eight, or up to 16 and 32 if these do not
        decide which is faster and took less than 20 s. Raises `RequestError`.
        """
        is_ids = isinstance(prompt, Sequence) and all(isinstance(one, int) for one in prompt)
        if not isinstance(prompt, str) and not (is_ids and prompt):
            raise RequestError("prompt", "must be one text, or the ids of one")
        asked = self._params(params, sampling)
        seed = secrets.randbits(63) if asked.seed is None else asked.seed
        asked = replace(asked, seed=seed, n=1, prefix_cache=False)
        routing = Speculation(reuse_outputs=False)

        def serve(speculation: SpeculationOverride) -> Text:
            [output] = self.router.generate(prompt, asked, speculation)
            return _text(output)

        with Progress() if is_live(sys.stderr) else nullcontext() as shown:
            found = Comparison(serve(routing), serve("off"))  # untimed
            until_s = time.monotonic() + _COMPARED_S
            while found.equal and found.routed.token_ids and not found.is_decided:
                if found.is_at_test and time.monotonic() > until_s:
                    break
                pair = len(found.ratios) + 1
                if shown is not None:
                    shown.show(f"comparing, pair {pair} of {PAIRS[0]} to {PAIRS[-1]}")
                # A random order: other work of the machine favours neither, and pairs are
                # independent; in the order A B, B A neighbours would be of one kind.
                if secrets.randbits(1):
                    routed, alone = serve(routing), serve("off")
                else:
                    alone, routed = serve("off"), serve(routing)
                found = found.followed_by(routed, alone)
        return found

    def close(self) -> None:
        """End running requests, and free the models' memory."""
        self._closing()
        self._router = None
        gc.collect()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        if self._router is None:
            return "LLM(closed)"
        *drafters, target = self._router.pool.names
        return f"LLM({target!r}, drafted for by {', '.join(drafters) or 'nothing'})"

    def _held_while(self, parts: Iterator[Delta]) -> Iterator[Delta]:
        """Yield from `parts` with a reference to this LLM, which may be the only one."""
        yield from parts

    def _params(self, params: SamplingParams | None, given: Mapping[str, Any]) -> SamplingParams:
        """Merge `params`, keywords and defaults. Raises `RequestError`."""
        unknown = next((name for name in given if name not in _SAMPLING), None)
        if unknown is not None:
            raise RequestError(unknown, "is no sampling parameter: `SamplingParams` has them")
        if not isinstance(params, SamplingParams | None):
            raise RequestError("params", f"must be SamplingParams, not {params!r}")
        changes = dict(given)
        if changes.pop("return_drafts", True) is not True:
            raise RequestError("return_drafts", "is always on: texts show who proposed what")
        if params is None:
            given = {**self.router.sampling_defaults, **changes}
            return SamplingParams(**given, return_drafts=True)
        if changes.get("max_tokens") is not None:
            changes.setdefault("max_new_tokens", changes["max_tokens"])
        return replace(params, **changes, return_drafts=True)


def _asked(
    target: str | Path | None,
    draft: str | Sequence[str] | None,
    settings: Mapping[str, Any],
    options: Mapping[str, Any],
) -> AskedTarget:
    """Return the configuration for the arguments of `LLM`. Raises `ConfigError`."""
    unknown = next((name for name in options if name not in _SETTINGS), None)
    if unknown is not None:
        raise ConfigError(unknown, f"is no option: there are {', '.join(_SETTINGS)}, and set")
    drafters = [draft] if isinstance(draft, str) else draft or ()
    if not isinstance(drafters, Sequence) or not all(isinstance(one, str) for one in drafters):
        raise ConfigError("draft", f"must be a name, a list of names or None, not {draft!r}")
    given = {_SETTINGS[name]: (name, value) for name, value in options.items() if value is not None}
    return asked_of(
        Given(
            target=None if target is None else str(target),
            draft=drafters,
            options=given,
            settings=list(settings.items()),
        )
    )


def _text(output: RequestOutput) -> Text:
    return Text(**vars(output))
