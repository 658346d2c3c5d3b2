"""ChatAnswer: the objects of `/v1/chat/completions`.

Contract: a stream's deltas, joined as OpenAI's clients join them, are the message of the whole
answer, but for the ids of its calls, which are drawn.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from specrouter.http.openai_answer import OpenAIAnswer, Prompt, ending, finite, output_of
from specrouter.http.openai_fields import ChatRequest
from specrouter.http.reasoning.answer_reader import Reader
from specrouter.http.reasoning.formats import Channels
from specrouter.http.streams import Outputs
from specrouter.http.token_texts import TokenTexts
from specrouter.http.tools.call_reader import CallNews, News
from specrouter.request.output import Delta, RequestOutput, TokenLogprobs

_ENDS_BY_ITSELF = ("eos", "stop")


@dataclass(frozen=True)
class Reading:
    """What reads an output; `channels`, where it may hold reasoning, to count its tokens."""

    reader: Callable[[], Reader]
    channels: Callable[[], Channels] | None = None


class ChatAnswer(OpenAIAnswer):
    kind, chunk_kind = "chat.completion", "chat.completion.chunk"

    def __init__(
        self,
        body: ChatRequest,
        envelope: dict[str, Any],
        prompt: Prompt,
        texts: TokenTexts,
        reading: Reading | None = None,
    ) -> None:
        """`reading`: of each choice; without it, the text is content."""
        super().__init__(body, envelope, [prompt], texts)
        self._top_count = body.top_logprobs or 0
        self._reading = reading
        self._readers: dict[int, Reader] = {}  # by choice
        self._counted: dict[int, Channels] = {}

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
        self._count_reasoning(index, part.token_ids)
        if isinstance(part, Delta):
            return self._choice_delta(index, part, is_first)
        message: dict[str, Any] = {"role": "assistant", "content": part.text, "refusal": None}
        reader = self._reader(index)
        if reader is not None:
            news = reader.read(part.text, ends=True)
            is_elsewhere = reader.calls or reader.forced or news.reasoning
            message["content"] = news.content or (None if is_elsewhere else "")
            message |= _reasoning(news)
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
            news |= _reasoning(found)
            if found.calls:
                news["tool_calls"] = [{"index": call.index, **_call(call)} for call in found.calls]
        return {"index": index, "delta": news, **self._rest(delta, reader)}

    def says_something(self, choice: Mapping[str, Any]) -> bool:
        news = choice["delta"]
        return any(news.get(field) for field in ("content", "tool_calls", "reasoning"))

    def _reader(self, index: int) -> Reader | None:
        if self._reading is not None and index not in self._readers:
            self._readers[index] = self._reading.reader()
        return self._readers.get(index)

    def _count_reasoning(self, index: int, tokens: Sequence[int]) -> None:
        """Those within it: neither tags nor headers."""
        if self._reading is None or self._reading.channels is None:
            return
        if index not in self._counted:
            self._counted[index] = self._reading.channels()
        channels = self._counted[index]
        for token in tokens:
            was_within = channels.field == "reasoning"
            list(channels.pieces(self.texts.text(token)))
            self._usage.reasoning_tokens += was_within and channels.field == "reasoning"

    def _rest(self, part: RequestOutput | Delta, reader: Reader | None) -> dict[str, Any]:
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


def _has_called(reader: Reader | None) -> bool:
    """What a stop text cut in two is no call."""
    return reader is not None and reader.calls > 0 and not reader.is_within_call


def _reasoning(news: News) -> dict[str, str]:
    """Under DeepSeek's name and vLLM's."""
    said = news.reasoning
    return {"reasoning_content": said, "reasoning": said} if said else {}


def _call(news: CallNews) -> dict[str, Any]:
    """A call, or more of one."""
    if news.name is None:
        return {"function": {"arguments": news.arguments}}
    function = {"name": news.name, "arguments": news.arguments}
    return {"id": f"call_{uuid.uuid4().hex[:24]}", "type": "function", "function": function}
