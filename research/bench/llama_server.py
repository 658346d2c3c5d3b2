"""llama.cpp's server as a contender: its own `/completion`, streamed, with prompts as token ids.

The same work as the engine's: the same ids, the same number of tokens after them, the same
temperature and nothing else that narrows the choice, no prompt read before. Its time includes HTTP.

Contract: a request that brings another number of tokens is a `MeasurementError`, since its time
could not be compared.
Source: llama.cpp, tools/server/README.md
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from modelpool.errors import ConfigError
from research.bench.peer import FIRST_TIMEOUT_S, OPENAI_VARIABLE, all_at_once
from specrouter.bench.contenders import MeasurementError
from specrouter.bench.figures import Sample, distinct_share, mean_of_known
from specrouter.bench.prompts import BenchPrompt, Work
from specrouter.http_client import (
    FAILURES,
    Server,
    check_url,
    events,
    read_api_key,
)

LLAMA_SERVER = "llama-server"


@dataclass(frozen=True, kw_only=True)
class Answer:
    """One request. `first_s`, `last_s`: when its first and last token came, on the same clock.

    `accepted`: drafted tokens among its tokens; None where the server does not draft.
    """

    token_ids: tuple[int, ...]
    tokens: int
    prompt_tokens: int | None
    first_s: float
    last_s: float
    accepted: int | None

    @property
    def tpot_ms(self) -> float | None:
        if self.tokens < 2:
            return None
        return 1000.0 * (self.last_s - self.first_s) / (self.tokens - 1)

    @property
    def acceptance_length(self) -> float | None:
        """Tokens per pass of the target."""
        return None if self.accepted is None else self.tokens / (self.tokens - self.accepted)


class LlamaServerContender:
    """Raises `ConfigError` where no llama-server answers."""

    name = LLAMA_SERVER

    def __init__(self, url: str, api_key: str | None = None) -> None:
        """`api_key`: None sends the environment's OPENAI_API_KEY, where there is one."""
        check_url("--peer", url)
        self._server = Server(url.rstrip("/"), read_api_key(OPENAI_VARIABLE, api_key))
        try:
            facts = self._server.ask("/props", None, FIRST_TIMEOUT_S)
            self._slots = int(facts["total_slots"])
            self._context = int(facts["default_generation_settings"]["n_ctx"])
        except FAILURES as error:
            reason = f"no llama-server at {url}: {type(error).__name__}: {error}"
            raise ConfigError("--peer", reason) from error

    def check(
        self, prompts: Sequence[BenchPrompt], batches: Sequence[int], new_tokens: int
    ) -> None:
        """Raises `ConfigError` where it cannot do the same work as the engine."""
        if max(batches) > self._slots:
            reason = f"has {self._slots} slots for batches of {max(batches)}: start it with"
            raise ConfigError("--peer", f"llama-server {reason} --parallel {max(batches)}")
        longest = max(len(prompt.token_ids) for prompt in prompts) + new_tokens
        if longest > self._context:
            reason = f"has {self._context} tokens for requests of {longest}: start it with more of"
            raise ConfigError("--peer", f"llama-server {reason} --ctx-size")
        try:
            self._check_ids(prompts[0])
        except ConfigError:
            raise
        except (*FAILURES, MeasurementError) as error:
            raise ConfigError("--peer", f"llama-server failed a first request: {error}") from error

    def supports(self, batch: int) -> bool:
        return batch <= self._slots

    def run(self, work: Work) -> Sample:
        return sample(*all_at_once(self.name, self._complete, work))

    def _check_ids(self, prompt: BenchPrompt) -> None:
        """That the server means the same text by the ids, and reads so many of them."""
        body = {"tokens": list(prompt.token_ids)}
        text = self._server.ask("/detokenize", body, FIRST_TIMEOUT_S)["content"]
        if text != prompt.text:
            reason = "llama-server reads other text in the same ids: is it the pool's target?"
            raise ConfigError("--peer", reason)
        answer = self._complete(prompt, 0, 1, 0.0, FIRST_TIMEOUT_S)
        if answer.prompt_tokens not in (None, len(prompt.token_ids)):
            reason = f"{answer.prompt_tokens} tokens of a prompt of {len(prompt.token_ids)}"
            raise ConfigError("--peer", f"llama-server reads {reason}")

    def _complete(
        self, prompt: BenchPrompt, seed: int, tokens: int, temperature: float, timeout_s: float
    ) -> Answer:
        body = {
            "prompt": list(prompt.token_ids),
            "n_predict": tokens,
            "temperature": temperature,
            "seed": seed % 2**32,  # of 32 bits there
            "ignore_eos": True,
            "stream": True,
            "cache_prompt": False,
            "samplers": ["temperature"],
            "repeat_penalty": 1.0,
        }
        with self._server.open("/completion", body, timeout_s) as response:
            answer = read_answer(events(response))
        if answer.tokens != tokens:
            raise MeasurementError(f"{self.name}: {answer.tokens} tokens came, not {tokens}")
        return answer


def read_answer(found: Iterator[Mapping[str, Any]]) -> Answer:
    """Raises `ValueError` for a stream with an error, or that ends without saying so."""
    ids: list[int] = []
    first_s = last_s = 0.0
    for event in found:
        if "error" in event:
            raise ValueError(str(event["error"])[:200])
        fresh = event.get("tokens") or ()
        if fresh or event.get("content"):
            last_s = time.perf_counter()
            first_s = first_s or last_s
        ids += fresh
        if event.get("stop"):
            return _answer(event, ids, first_s, last_s)
    raise ValueError("the stream broke off")


def sample(answers: Sequence[Answer], seconds: float) -> Sample:
    """Of one batch."""
    accepted = [one.acceptance_length for one in answers if one.acceptance_length is not None]
    return Sample(
        tokens=sum(one.tokens for one in answers),
        seconds=seconds,
        distinct=tuple(distinct_share(one.token_ids) for one in answers),
        acceptance_length=sum(accepted) / len(accepted) if len(accepted) == len(answers) else None,
        requests=len(answers),
        tpot_ms=mean_of_known(one.tpot_ms for one in answers),
    )


def _answer(last: Mapping[str, Any], ids: list[int], first_s: float, last_s: float) -> Answer:
    if last.get("truncated"):
        raise ValueError("the text was truncated")
    evaluated = last.get("tokens_evaluated")
    timings = last.get("timings") or {}
    return Answer(
        token_ids=tuple(ids),
        tokens=int(last.get("tokens_predicted", len(ids))),
        prompt_tokens=None if evaluated is None else int(evaluated),
        first_s=first_s,
        last_s=last_s,
        accepted=int(timings["draft_n_accepted"]) if timings.get("draft_n") else None,
    )
