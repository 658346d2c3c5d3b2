"""Another server that speaks OpenAI's completions, asked with as many requests at once as a batch.

Its time includes HTTP, which the other contenders do without.
"""

import http.client
import json
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from modelpool.errors import ConfigError
from specrouter.bench.api_key import OPENAI_VARIABLE, authorize, read_api_key
from specrouter.bench.prompts import Tokenize, Work
from specrouter.bench.sample import MeasurementError, Sample, distinct_share

_TIMEOUT_S = 600.0
_FIRST_TIMEOUT_S = 60.0
FAILURES = (OSError, ValueError, http.client.HTTPException)

# A proxy would be measured too.
DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))


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
        if not url.startswith(("http://", "https://")):
            raise ConfigError("--peer", f"{url!r} is no http address")
        self._url = url.rstrip("/").removesuffix("/v1") + "/v1"
        self._api_key = read_api_key(OPENAI_VARIABLE, api_key)
        self.tokenize = tokenize
        try:
            self._model = self._first_model()
            self._complete("Hello", 0, 1, 0.0, _FIRST_TIMEOUT_S)
        except FAILURES as error:
            raise ConfigError("--peer", f"no completions from {url}: {error}") from error

    def supports(self, batch: int) -> bool:
        return True

    def run(self, work: Work) -> Sample:
        def one(text: str, seed: int) -> Mapping[str, Any]:
            return self._complete(text, seed, work.new_tokens, work.temperature, _TIMEOUT_S)

        texts = [prompt.text for prompt in work.prompts]
        try:
            with ThreadPoolExecutor(len(texts)) as executor:
                started = time.perf_counter()
                answers = list(executor.map(one, texts, work.seeds))
                seconds = time.perf_counter() - started
        except FAILURES as error:
            raise MeasurementError(f"peer: {error}") from error
        tokens = sum(_completion_tokens(answer, work.new_tokens) for answer in answers)
        distinct = tuple(map(self._distinct, answers))
        return Sample(tokens, seconds, distinct, requests=len(answers))

    def _distinct(self, answer: Mapping[str, Any]) -> float:
        text = str(answer["choices"][0].get("text", ""))
        return distinct_share(self.tokenize(text) if self.tokenize and text else ())

    def _first_model(self) -> str | None:
        """None: the server does not say, and may not want to be told."""
        try:
            return str(self._ask("/models", None, _FIRST_TIMEOUT_S)["data"][0]["id"])
        except (urllib.error.HTTPError, LookupError, TypeError):
            return None

    def _complete(
        self, text: str, seed: int, tokens: int, temperature: float, timeout_s: float
    ) -> Mapping[str, Any]:
        body = {
            "prompt": text,
            "max_tokens": tokens,
            "temperature": temperature,
            "seed": seed,
            "ignore_eos": True,
        }
        answer = self._ask("/completions", {"model": self._model, **body}, timeout_s)
        if not isinstance(answer, dict) or not answer.get("choices"):
            raise ValueError(f"its answer has no choices: {str(answer)[:80]}")
        return answer

    def _ask(self, path: str, body: Mapping[str, Any] | None, timeout_s: float) -> Any:
        sent = {name: value for name, value in (body or {}).items() if value is not None}
        request = urllib.request.Request(
            self._url + path,
            None if body is None else json.dumps(sent).encode(),
            {"Content-Type": "application/json"},
        )
        authorize(request, self._api_key)
        with DIRECT.open(request, timeout=timeout_s) as response:
            return json.load(response)


def _completion_tokens(answer: Mapping[str, Any], asked: int) -> int:
    """As the server counts them; one that does not say is believed to have made what was asked."""
    usage = answer.get("usage") or {}
    counted = usage.get("completion_tokens")
    return asked if counted is None else int(counted)
