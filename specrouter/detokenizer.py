"""Token ids to text, as they come: never a broken character, never part of a stop text."""

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

_BROKEN = "\ufffd"  # what half a character decodes to


class Detokenizer:
    """Of one request. `push` returns the text that became certain with a token.

    Text that could be the beginning of a stop text is held back until that is decided. The stop
    text that ended the text, `stopped_by`, is part of it only if `keep_stop`.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        stop: Sequence[str],
        keep_stop: bool = False,
        skip_special_tokens: bool = True,
    ) -> None:
        self._tokenizer = tokenizer
        self._stop = tuple(stop)
        self._keep_stop = keep_stop
        self._skip_special_tokens = skip_special_tokens
        self._context: list[int] = []  # ids whose text is known; the next ids' text hangs on them
        self._pending: list[int] = []  # ids that end within a character
        self._shown = 0  # characters of context and pending ids that were released
        self._held = ""  # released, but maybe the beginning of a stop text
        self.text = ""  # all that was returned
        self.stopped_by: str | None = None

    @property
    def stopped(self) -> bool:
        return self.stopped_by is not None

    def push(self, token: int) -> str:
        """Text that is certain now. Sets `stopped_by` where the text holds a stop text."""
        self._pending.append(token)
        decoded = self._decode(self._context + self._pending)
        if decoded.endswith(_BROKEN):  # the last character may yet become whole
            certain = decoded[self._shown : -1]
            self._shown += len(certain)
        else:
            certain = decoded[self._shown :]
            self._context, self._pending = self._pending, []
            self._shown = len(self._decode(self._context))
        return self._release(certain)

    def finish(self) -> str:
        """The rest: what was held back, and what will not become whole characters any more."""
        if self.stopped:
            return ""
        rest = self._decode(self._context + self._pending)[self._shown :]
        rest, self._held, self._pending = self._held + rest, "", []
        self.text += rest
        return rest

    def _decode(self, ids: list[int]) -> str:
        text = self._tokenizer.decode(
            ids,
            skip_special_tokens=self._skip_special_tokens,
            clean_up_tokenization_spaces=False,
        )
        assert isinstance(text, str)  # a list only for several sequences
        return text

    def _release(self, new: str) -> str:
        self._held += new
        found = [(at, stop) for stop in self._stop if (at := self._held.find(stop)) >= 0]
        if found:
            at, self.stopped_by = min(found, key=lambda one: one[0])
            end = at + len(self.stopped_by) if self._keep_stop else at
            shown, self._held = self._held[:end], ""
        else:
            keep = max((_overlap(self._held, stop) for stop in self._stop), default=0)
            cut = len(self._held) - keep
            shown, self._held = self._held[:cut], self._held[cut:]
        self.text += shown
        return shown


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that `stop` begins with."""
    longest = min(len(text), len(stop) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(stop[:n])), 0)
