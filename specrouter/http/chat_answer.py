"""ChatAnswer: the objects of `/v1/chat/completions`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from specrouter.http.openai_answer import Envelope, OpenAIAnswer, Prompt, ending, finite
from specrouter.http.openai_fields import ChatRequest
from specrouter.http.streams import Outputs
from specrouter.http.token_texts import TokenTexts
from specrouter.request.output import Delta, RequestOutput, TokenLogprobs


class ChatAnswer(OpenAIAnswer):
    kind, chunk_kind = "chat.completion", "chat.completion.chunk"

    def __init__(
        self, body: ChatRequest, envelope: Envelope, prompt: Prompt, texts: TokenTexts
    ) -> None:
        super().__init__(body, envelope, [prompt], texts)
        self._top_count = body.top_logprobs or 0

    def whole(self, outputs: Outputs) -> dict[str, Any]:
        answer = super().whole(outputs)
        if self.body.prompt_logprobs is not None:
            answer["prompt_logprobs"] = self.prompt_logprobs(0, outputs[0][1].prompt_logprobs)
        if self.body.return_token_ids:
            answer["prompt_token_ids"] = list(self.prompts[0].token_ids)
        return answer

    def chunk(self, prompt: int, delta: Delta) -> dict[str, Any] | None:
        is_first = not self._begun
        chunk = super().chunk(prompt, delta)
        if chunk is not None and is_first:
            if self.body.prompt_logprobs is not None:
                chunk["prompt_logprobs"] = self.prompt_logprobs(0, delta.prompt_logprobs)
            if self.body.return_token_ids:
                chunk["prompt_token_ids"] = list(self.prompts[0].token_ids)
        return chunk

    def choice(self, prompt: int, index: int, output: RequestOutput) -> dict[str, Any]:
        message = {"role": "assistant", "content": output.text, "refusal": None}
        return {"index": index, "message": message, **self._rest(output, output)}

    def choice_delta(self, prompt: int, index: int, delta: Delta, is_first: bool) -> dict[str, Any]:
        role = {"role": "assistant"} if is_first else {}
        news = {**role, "content": delta.text}
        return {"index": index, "delta": news, **self._rest(delta, delta.output)}

    def _rest(self, part: RequestOutput | Delta, output: RequestOutput | None) -> dict[str, Any]:
        rest = {"logprobs": self._logprobs(part.logprobs), **ending(output)}
        if self.body.return_token_ids:
            rest["token_ids"] = list(part.token_ids)
        return rest

    def _logprobs(self, positions: Sequence[TokenLogprobs] | None) -> dict[str, Any] | None:
        if positions is None:
            return None
        content = [
            {
                **self._candidate(one.token_id, one.logprob),
                "top_logprobs": [self._candidate(*other) for other in one.top[: self._top_count]],
            }
            for one in positions
        ]
        return {"content": content, "refusal": None}

    def _candidate(self, token: int, logprob: float) -> dict[str, Any]:
        return {
            "token": self.texts.text(token),
            "logprob": finite(logprob),
            "bytes": list(self.texts.data(token)),
        }
