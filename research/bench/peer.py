"""Another server that speaks OpenAI's completions, asked with as many requests at once as a batch.

Its time includes HTTP, which the other contenders do without.
"""

import time
import urllib.error
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from modelpool.errors import ConfigError
from specrouter.bench.contenders import MeasurementError
from specrouter.bench.figures import Sample, distinct_share
from specrouter.bench.prompts import BenchPrompt, Tokenize, Work
from specrouter.http_client import FAILURES, Server, check_url, read_api_key

Reply = TypeVar("Reply")

OPENAI_VARIABLE = "OPENAI_API_KEY"
TIMEOUT_S = 600.0
FIRST_TIMEOUT_S = 60.0


class PeerContender:
    """Raises `ConfigError` where the server does not answer a first, short request."""

    name = "peer"

    def __init__(
        self, url: str, tokenize: Tokenize | None = None, api_key: str | None = None
    ) -> None:
        """
        Args:
            tokenize: the pool's tokenizer, which finds repetitions in the peer's texts.
            api_key: None sends the environment's OPENAI_API_KEY, where there is one.
        """
        check_url("--peer", url)
        key = read_api_key(OPENAI_VARIABLE, api_key)
        self._server = Server(url.rstrip("/").removesuffix("/v1") + "/v1", key)
        self.tokenize = tokenize
        try:
            self._model = self._first_model()
            self._complete(BenchPrompt("", "Hello", ()), 0, 1, 0.0, FIRST_TIMEOUT_S)
        except FAILURES as error:
            raise ConfigError("--peer", f"no completions from {url}: {error}") from error

    def supports(self, batch: int) -> bool:
        return True

    def run(self, work: Work) -> Sample:
        answers, seconds = all_at_once(self.name, self._complete, work)
        tokens = sum(_completion_tokens(answer, work.new_tokens) for answer in answers)
        distinct = tuple(map(self._distinct, answers))
        return Sample(tokens=tokens, seconds=seconds, distinct=distinct, requests=len(answers))

    def _distinct(self, answer: Mapping[str, Any]) -> float:
        text = str(answer["choices"][0].get("text", ""))
        return distinct_share(self.tokenize(text) if self.tokenize and text else ())

    def _first_model(self) -> str | None:
        """None: the server does not say, and may not want to be told."""
        try:
            return str(self._server.ask("/models", None, FIRST_TIMEOUT_S)["data"][0]["id"])
        except (urllib.error.HTTPError, LookupError, TypeError):
            return None

    def _complete(
        self, prompt: BenchPrompt, seed: int, tokens: int, temperature: float, timeout_s: float
    ) -> Mapping[str, Any]:
        body = {
            "prompt": prompt.text,
            "max_tokens": tokens,
            "temperature": temperature,
            "seed": seed,
            "ignore_eos": True,
        }
        named = {} if self._model is None else {"model": self._model}
        answer = self._server.ask("/completions", {**named, **body}, timeout_s)
        if not isinstance(answer, dict) or not answer.get("choices"):
            raise ValueError(f"its answer has no choices: {str(answer)[:80]}")
        return answer


def all_at_once(
    name: str, ask: Callable[[BenchPrompt, int, int, float, float], Reply], work: Work
) -> tuple[list[Reply], float]:
    """Answers to a batch that is sent at once, and the seconds until the last one has come.

    `ask`: with a prompt, its seed, the tokens of an answer, a temperature and a limit in seconds.
    Raises `MeasurementError` where a request fails.
    """

    def one(prompt: BenchPrompt, seed: int) -> Reply:
        return ask(prompt, seed, work.new_tokens, work.temperature, TIMEOUT_S)

    try:
        with ThreadPoolExecutor(len(work.prompts)) as executor:
            started = time.perf_counter()
            answers = list(executor.map(one, work.prompts, work.seeds))
            return answers, time.perf_counter() - started
    except FAILURES as error:
        raise MeasurementError(f"{name}: {type(error).__name__}: {error}") from error


def _completion_tokens(answer: Mapping[str, Any], asked: int) -> int:
    """As the server counts them; one that does not say is believed to have made what was asked."""
    usage = answer.get("usage") or {}
    counted = usage.get("completion_tokens")
    return asked if counted is None else int(counted)
