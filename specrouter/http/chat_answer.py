"""ChatAnswer: the objects of `/v1/chat/completions`.

Contract: a stream's deltas, joined as OpenAI's clients join them, are the message of the whole
answer, but for the ids of its calls, which are drawn.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from specrouter.http.openai_answer import Envelope, OpenAIAnswer, Prompt, ending, finite, output_of
from specrouter.http.openai_fields import ChatRequest
from specrouter.http.streams import Outputs
from specrouter.http.token_texts import TokenTexts
from specrouter.http.tools.call_reader import CallNews, CallReader
from specrouter.request.output import Delta, RequestOutput, TokenLogprobs

NewReader = Callable[[], CallReader]
_ENDS_BY_ITSELF = ("eos", "stop")


class ChatAnswer(OpenAIAnswer):
    kind, chunk_kind = "chat.completion", "chat.completion.chunk"

    def __init__(
        self,
        body: ChatRequest,
        envelope: Envelope,
        prompt: Prompt,
        texts: TokenTexts,
        new_reader: NewReader | None = None,
    ) -> None:
        """`new_reader`: of tool calls, one for each choice; without one, the text is content."""
        super().__init__(body, envelope, [prompt], texts)
        self._top_count = body.top_logprobs or 0
        self._new_reader = new_reader
        self._readers: dict[int, CallReader] = {}  # of a stream, by choice

    def whole(self, outputs: Outputs) -> dict[str, Any]:
        return {**super().whole(outputs), **self._of_prompt(outputs[0][1])}

    def chunk(self, prompt: int, delta: Delta) -> dict[str, Any] | None:
        is_first = not self._begun
        chunk = super().chunk(prompt, delta)
        return chunk if chunk is None or not is_first else {**chunk, **self._of_prompt(delta)}

    def _of_prompt(self, part: RequestOutput | Delta) -> dict[str, Any]:
        found: dict[str, Any] = {}
        if self.body.prompt_logprobs is not None:
            found["prompt_logprobs"] = self.prompt_logprobs(0, part.prompt_logprobs)
        if self.body.return_token_ids:
            found["prompt_token_ids"] = list(self.prompts[0].token_ids)
        return found

    def choice(
        self, prompt: int, index: int, part: RequestOutput | Delta, is_first: bool
    ) -> dict[str, Any]:
        if isinstance(part, Delta):
            return self._choice_delta(index, part, is_first)
        message: dict[str, Any] = {"role": "assistant", "content": part.text, "refusal": None}
        reader = self._new_reader and self._new_reader()
        if reader is not None:
            news = reader.read(part.text, ends=True)
            message["content"] = news.content or (None if reader.calls or reader.forced else "")
            if news.calls:
                message["tool_calls"] = [_call(call) for call in news.calls]
        return {"index": index, "message": message, **self._rest(part, reader)}

    def _choice_delta(self, index: int, delta: Delta, is_first: bool) -> dict[str, Any]:
        news: dict[str, Any] = {"role": "assistant"} if is_first else {}
        reader = self._reader(index)
        if reader is None:
            news["content"] = delta.text
        else:
            found = reader.read(delta.text, ends=delta.output is not None)
            if found.content or is_first:
                news["content"] = found.content or None
            if found.calls:
                news["tool_calls"] = [{"index": call.index, **_call(call)} for call in found.calls]
        return {"index": index, "delta": news, **self._rest(delta, reader)}

    def says_something(self, choice: Mapping[str, Any]) -> bool:
        news = choice["delta"]
        return bool(news.get("content") or news.get("tool_calls"))

    def _reader(self, index: int) -> CallReader | None:
        if self._new_reader is not None and index not in self._readers:
            self._readers[index] = self._new_reader()
        return self._readers.get(index)

    def _rest(self, part: RequestOutput | Delta, reader: CallReader | None) -> dict[str, Any]:
        output = output_of(part)
        rest = {"logprobs": self._logprobs(part.logprobs), **ending(output)}
        if output is not None and output.finish_reason in _ENDS_BY_ITSELF and _has_called(reader):
            rest["finish_reason"] = "tool_calls"
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


def _has_called(reader: CallReader | None) -> bool:
    """What a stop text cut in two is no call."""
    return reader is not None and reader.calls > 0 and not reader.is_within_call


def _call(news: CallNews) -> dict[str, Any]:
    """A call, or more of one."""
    if news.name is None:
        return {"function": {"arguments": news.arguments}}
    function = {"name": news.name, "arguments": news.arguments}
    return {"id": f"call_{uuid.uuid4().hex[:24]}", "type": "function", "function": function}
