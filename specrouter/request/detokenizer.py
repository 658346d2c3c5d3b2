"""Incremental detokenization: no partial character, and no part of a stop text, is returned.

Contract: the returned text is a prefix of the text of all ids together, except around bytes that
are no characters: some tokenizers then make a whole run of bytes unreadable.
"""

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

from specrouter.request.params import SamplingParams

_BROKEN = "\ufffd"  # text of a partial character
_BROKEN_BYTES = 3  # of a partial character: byte fallback makes each of them a broken one
_MOST_PENDING = 256  # bound of pending ids, since each push decodes all of them again
_SEEN = 8  # last ids of the prompt, on which the start of the text may depend


class Detokenizer:
    """The text of one request. `push` returns the text that became certain with a token.

    Text that could be the beginning of a stop text is held back until that is decided. The stop
    text that ended the text, `stopped_by`, is part of it only if the parameters say so; one that is
    complete with the first `min_tokens` tokens ends nothing. The text follows `prompt`:
    SentencePiece's tokenizers drop the space at a text's beginning, and only there.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        params: SamplingParams,
        prompt: Sequence[int] = (),
    ) -> None:
        self._tokenizer = tokenizer
        self._stop, self._keep_stop = params.stop, params.include_stop_str_in_output
        self._unstopped = params.min_tokens  # further tokens in which stop texts do not count
        self._skip_special_tokens = params.skip_special_tokens
        self._hidden: set[int] | None = None  # None: the tokenizer skips them itself
        shown = params.shown_special_token_ids
        if shown and params.skip_special_tokens:
            added = tokenizer.added_tokens_decoder.items()
            self._hidden = {one for one, token in added if token.special} - {*shown}
        self._prompt = list(prompt[-_SEEN:])  # its end, until the first token comes
        self._context: list[int] = []  # ids that the text of the next ones depends on
        self._known = ""  # their text
        self._pending: list[int] = []  # ids that end within a character
        self._shown = 0  # characters of context and pending ids that were released
        self._held = ""  # released, but perhaps the beginning of a stop text
        self.text = ""  # all that was returned
        self.stopped_by: str | None = None

    @property
    def stopped(self) -> bool:
        return self.stopped_by is not None

    def push(self, token: int) -> str:
        """Return the text that is certain now. Sets `stopped_by` if the text holds a stop text."""
        if self._prompt:
            self._go_on_after_prompt()
        self._unstopped -= 1
        self._pending.append(token)
        decoded = self._decode_all()
        is_endless = len(self._pending) >= _MOST_PENDING
        whole = decoded if is_endless else decoded.rstrip(_BROKEN)  # the last may yet be completed
        certain = decoded[self._shown : max(len(whole), len(decoded) - _BROKEN_BYTES)]
        self._shown += len(certain)
        if whole == decoded:
            self._move_on(decoded)
        return self._release(certain)

    def finish(self) -> str:
        """Return the rest: held-back text, and characters that will not be completed."""
        if self.stopped:
            return ""
        rest = self._decode_all()[self._shown :]
        rest, self._held, self._pending = self._held + rest, "", []
        self.text += rest
        return rest

    def _go_on_after_prompt(self) -> None:
        """Make the prompt's last ids the context, cut where characters begin and end.

        If the prompt ends within a character, the rest of it stays broken.
        """
        last, self._prompt = self._prompt, []
        cuts = (
            last[start:end]
            for end in range(len(last), max(0, len(last) - _BROKEN_BYTES - 1), -1)
            for start in range(end)
        )
        self._context = next((ids for ids in cuts if self._is_whole(ids)), [])
        self._known = self._decode(self._context)
        self._shown = len(self._known)

    def _is_whole(self, ids: list[int]) -> bool:
        text = self._decode(ids)
        return not text.startswith(_BROKEN) and not text.endswith(_BROKEN)

    def _decode_all(self) -> str:
        """Return the text of context and pending ids; the context's text never changes."""
        text = self._decode(self._context + self._pending)
        return text if text.startswith(self._known) else self._known + self._decode(self._pending)

    def _move_on(self, decoded: str) -> None:
        """Make the pending ids the context, with a text if possible.

        After an id without text, such as a special one, the next could still lose its space.
        """
        text = self._decode(self._pending)
        if text:
            self._context, self._known = self._pending, text
        elif decoded != self._known or not decoded:
            self._context, self._known = self._context + self._pending, decoded
        self._pending, self._shown = [], len(self._known)

    def _decode(self, ids: list[int]) -> str:
        if self._hidden is not None:
            ids = [one for one in ids if one not in self._hidden]
        text = self._tokenizer.decode(
            ids,
            skip_special_tokens=self._skip_special_tokens and self._hidden is None,
            clean_up_tokenization_spaces=False,
        )
        assert isinstance(text, str)  # a list only for several sequences
        return text

    def _release(self, new: str) -> str:
        before = len(self._held)
        self._held += new
        stops = self._stop if self._unstopped < 0 else ()
        # A stop text can only end in the new text.
        starts = ((stop, max(0, before - len(stop) + 1)) for stop in stops)
        found = [(at, stop) for stop, start in starts if (at := self._held.find(stop, start)) >= 0]
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
    """Return the length of the longest end of `text` that `stop` begins with."""
    longest = min(len(text), len(stop) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(stop[:n])), 0)
