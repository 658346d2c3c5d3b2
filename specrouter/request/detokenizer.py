"""Token ids to text, as they come: never a broken character, never part of a stop text.

Contract: what was returned is the beginning of what all ids together decode to, except where bytes
that are no characters stand: some tokenizers then make a whole run of bytes unreadable.
"""

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

from specrouter.request.params import SamplingParams

_BROKEN = "\ufffd"  # what half a character decodes to
_BROKEN_BYTES = 3  # of half a character: byte fallback makes each of them a broken one
_MOST_PENDING = 256  # ids without one at which text ends: each push reads all of them again
_SEEN = 8  # ids of the prompt that the text's beginning may hang on


class Detokenizer:
    """Of one request. `push` returns the text that became certain with a token.

    Text that could be the beginning of a stop text is held back until that is decided. The stop
    text that ended the text, `stopped_by`, is part of it only where the parameters say so; one that
    is complete with the first `min_tokens` tokens ends nothing. The text goes on after `prompt`:
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
        self._unstopped = params.min_tokens  # tokens to come with which no stop text ends
        self._skip_special_tokens = params.skip_special_tokens
        self._hidden: set[int] | None = None  # None: the tokenizer skips them itself
        shown = params.shown_special_token_ids
        if shown and params.skip_special_tokens:
            added = tokenizer.added_tokens_decoder.items()
            self._hidden = {one for one, token in added if token.special} - {*shown}
        self._prompt = list(prompt[-_SEEN:])  # its end, until the first token comes
        self._context: list[int] = []  # the next ids' text hangs on these
        self._known = ""  # their text
        self._pending: list[int] = []  # ids that end within a character
        self._shown = 0  # characters of context and pending ids, without the new
        self._held = ""  # released, but maybe the beginning of a stop text
        self.text = ""  # all that was returned
        self.stopped_by: str | None = None

    @property
    def stopped(self) -> bool:
        return self.stopped_by is not None

    def push(self, token: int) -> str:
        """Text that is certain now. Sets `stopped_by` where the text holds a stop text."""
        if self._prompt:
            self._go_on_after_prompt()
        self._unstopped -= 1
        self._pending.append(token)
        decoded = self._decode_all()
        is_endless = len(self._pending) >= _MOST_PENDING
        whole = decoded if is_endless else decoded.rstrip(_BROKEN)  # the last may yet become whole
        certain = decoded[self._shown : max(len(whole), len(decoded) - _BROKEN_BYTES)]
        self._shown += len(certain)
        if whole == decoded:
            self._move_on(decoded)
        return self._release(certain)

    def finish(self) -> str:
        """The rest: what was held back, and what will not become whole characters any more."""
        if self.stopped:
            return ""
        rest = self._decode_all()[self._shown :]
        rest, self._held, self._pending = self._held + rest, "", []
        self.text += rest
        return rest

    def _go_on_after_prompt(self) -> None:
        """Makes its last ids the context, cut where characters begin and end.

        The rest of a character that the prompt ends within is not the prompt's: it stays broken.
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
        """Of context and pending ids; bytes that follow the context do not change its text."""
        text = self._decode(self._context + self._pending)
        return text if text.startswith(self._known) else self._known + self._decode(self._pending)

    def _move_on(self, decoded: str) -> None:
        """Makes the pending ids the context. It has a text if it can: an id of none, such as a
        special one, does not keep the space of the next from being dropped.
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
        # It ends in what is new.
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
    """Length of the longest end of `text` that `stop` begins with."""
    longest = min(len(text), len(stop) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(stop[:n])), 0)
