"""Bodies of the endpoints that clients of OpenAI and vLLM use.

What can be checked in a body alone is refused here, with `RequestError`s that name its field.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from specrouter.http.request_fields import RequestFields
from specrouter.http.tools.tool_use import ToolUse, asked_tools
from specrouter.request.conversation import ContentPart, Conversation, part_text
from specrouter.request.fields import Count, InnerFields, Refused, Text, TokenIds, Tokens, refused
from specrouter.request.params import LogprobCount, RequestError, Samples, Speculation


def _prompt_kind(prompt: Any) -> str | None:
    """Return the kind of a prompt, by the first element of a list.

    Thus a list is validated once, as one kind, and gets the errors of that kind only.
    """
    if isinstance(prompt, str):
        return "one_text"
    if not isinstance(prompt, list):
        return None
    if prompt and isinstance(prompt[0], list):
        return "several_ids"
    return "one_ids" if prompt and isinstance(prompt[0], int) else "several_texts"


_Ids = Annotated[TokenIds, Field(min_length=1)]
Prompt = Annotated[
    Annotated[Text, Tag("one_text")]
    | Annotated[list[Text], Field(min_length=1, fail_fast=True), Tag("several_texts")]
    | Annotated[_Ids, Tag("one_ids")]
    | Annotated[list[_Ids], Field(fail_fast=True), Tag("several_ids")],
    Discriminator(
        _prompt_kind,
        custom_error_type="prompt_kind",
        custom_error_message="must be a text, a list of token ids, or a list of either",
    ),
]


class StreamOptions(InnerFields):
    """Options of a stream: which chunks have the usage."""

    include_usage: bool | None = None
    """Adds a last chunk with the usage and no choices."""
    continuous_usage_stats: bool | None = None
    """Adds the usage so far to every chunk."""
    include_obfuscation: bool | None = None
    """Ignored: chunks are not padded."""


class OpenAIRequest(RequestFields):
    """Fields common to completions and chats; the default temperature is 1."""

    max_tokens: Count | None = None
    """Maximum number of output tokens."""
    max_completion_tokens: Count | None = None
    """OpenAI's newer name of `max_tokens`; takes precedence if both are given."""
    stream_options: StreamOptions | None = None
    """Options of the stream; only with `stream`."""
    return_token_ids: bool | None = None
    """Adds the token ids of the prompt and the output to the choices."""
    user: Text | None = None
    """Ignored."""

    @property
    def asked_tokens(self) -> int | None:
        newer = self.max_completion_tokens
        return self.max_tokens if newer is None else newer

    def field_names(self) -> dict[str, str]:
        newer = self.max_completion_tokens is not None
        name = "max_completion_tokens" if newer else "max_tokens"
        return {"max_new_tokens": name, **super().field_names()}

    def check(self) -> None:
        super().check()
        if self.stream_options is not None and not self.stream:
            raise RequestError("stream_options", "goes with stream only")


class CompletionRequest(OpenAIRequest):
    prompt: Prompt
    """A text, a list of texts, a list of token ids, or a list of such lists."""
    best_of: Samples | None = None
    """Number of samples, of which the `n` with the best mean log-probability are returned."""
    echo: bool | None = None
    """The output begins with the prompt."""
    logprobs: LogprobCount | None = None
    """Returns log-probabilities of the output's tokens, with this many alternatives."""
    suffix: Text | None = None
    """Refused: infilling is not supported."""
    add_special_tokens: bool | None = None
    """Adds the tokenizer's special tokens to a prompt given as text; true by default."""
    prompt_embeds: Refused = refused("is not supported: a prompt is text or token ids")

    @property
    def samples(self) -> int:
        return self.best_of or self.n or 1

    @property
    def prompts(self) -> list[str | list[int]]:
        if isinstance(self.prompt, str):
            return [self.prompt]
        if isinstance(self.prompt[0], int):
            return [self.prompt]
        return list(self.prompt)

    def field_names(self) -> dict[str, str]:
        samples = "n" if self.best_of is None else "best_of"
        return {**super().field_names(), "input_ids": "prompt", "n": samples}

    def check(self) -> None:
        super().check()
        if self.suffix:
            raise RequestError("suffix", "is not supported: no text is filled in")
        if self.asked_tokens == 0 and not self.echo:
            name = self.field_names()["max_new_tokens"]
            raise RequestError(name, "must be at least 1 without echo")
        if self.best_of is not None and self.best_of < (self.n or 1):
            raise RequestError("best_of", f"must be at least n, which is {self.n}")
        if self.stream and self.best_of is not None and self.best_of > (self.n or 1):
            raise RequestError("best_of", "cannot be streamed when above n")


class Prediction(InnerFields):
    """OpenAI's Predicted Outputs: most of the output, known beforehand."""

    type: Literal["content"]
    """Always `content`."""
    content: Text | list[ContentPart]
    """Predicted text, or a list of text parts."""

    def text(self) -> str:
        """Return the predicted text, or raise `RequestError`."""
        if isinstance(self.content, str):
            return self.content
        parts = enumerate(self.content)
        return "".join(part_text(f"prediction.content[{at}]", part) for at, part in parts)


class ChatRequest(OpenAIRequest, Conversation):
    max_tokens: Tokens | None = None
    """Maximum number of output tokens. By default what fits, or at most 2,048 if
    `engine.max_model_len` is not set."""
    max_completion_tokens: Tokens | None = None
    """OpenAI's newer name of `max_tokens`; takes precedence if both are given."""
    logprobs: bool | None = None
    """Returns log-probabilities of the output's tokens."""
    top_logprobs: LogprobCount | None = None
    """Number of alternatives of each token; only with `logprobs`."""
    tool_choice: Literal["none", "auto", "required"] | dict[str, Any] | None = None
    """`none` hides the tools from the template; `auto` shows them; `required` or a named function
    forces calls."""
    parallel_tool_calls: bool | None = None
    """`false` allows at most one call."""
    include_reasoning: bool | None = None
    """`false` leaves out the reasoning."""
    prediction: Prediction | None = None
    """Expected output, from which the text drafter drafts, if there is one."""
    echo: Refused = refused("is not supported in chats")
    function_call: Refused = refused(
        "is not supported: see tool_choice, which took its place", neutral="none"
    )
    functions: Refused = refused("is not supported: give tools, which took their place")
    modalities: Refused = refused("is not supported but for text", neutral=["text"])
    verbosity: Refused = refused("is not supported: say it in a message", neutral="medium")
    web_search_options: Refused = refused("is not supported: nothing is looked up")

    def field_names(self) -> dict[str, str]:
        names = {"logprobs": "top_logprobs", "input_ids": "messages", "prompt": "messages"}
        if self.tool_use is not None and self.tool_use.forced:
            names["structure"] = "tools"
        return {**super().field_names(), **names}

    def speculation_override(self) -> Literal["off"] | Speculation | None:
        override = super().speculation_override()
        if self.prediction is None or override == "off":
            return override
        return replace(override or Speculation(), prediction=self.prediction.text())

    @cached_property
    def tool_use(self) -> ToolUse | None:
        """Tools that the answer may call, or None; raises `RequestError`."""
        if not self.tools and self.tool_choice in (None, "none", "auto"):
            return None
        return asked_tools(self.tools, self.tool_choice, self.parallel_tool_calls)

    @property
    def has_structure(self) -> bool:
        use = self.tool_use
        return (use is not None and use.forced) or super().has_structure

    def check(self) -> None:
        super().check()
        if self.top_logprobs and not self.logprobs:
            raise RequestError("top_logprobs", "goes with logprobs only")
        use, (structure, field) = self.tool_use, self.asked_structure
        # OpenAI's form applies to an answer without calls; the others apply to the whole text.
        if use and use.forced and structure and not field.startswith("response_format"):
            raise RequestError(field, "contradicts tool_choice, which makes the answer calls")
