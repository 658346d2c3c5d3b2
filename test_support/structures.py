"""Structures for the checks, and what they allow by `llguidance` alone, as its documents have it.

Contract: nothing of the engine's grammars is used, and every text is read from its beginning.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from llguidance import LLMatcher, LLTokenizer
from numpy.typing import NDArray
from torch import Tensor

from specrouter import Structure

SCHEMA = {
    "type": "object",
    "properties": {
        "kind": {"enum": ["jump", "run"]},
        "count": {"type": "integer", "minimum": 0, "maximum": 99},
        "tags": {"type": "array", "items": {"type": "boolean"}, "maxItems": 2},
    },
    "required": ["kind", "count"],
    "additionalProperties": False,
}
LIST = 'start: "(" item ("," item)* ")"\nitem: /[a-z]{1,3}/ | start'
STRUCTURES = (
    Structure("json_object"),
    Structure("json_schema", json.dumps(SCHEMA)),
    Structure("regex", r"(the|fox|[0-9]{1,4}-)+[A-Z]?"),
    Structure("choice", json.dumps(["the quick fox", "the quick brown fox", "jumps", "é"])),
    Structure("grammar", LIST),
)


def definition(structure: Structure) -> str:
    """What `llguidance` compiles; white space as this router's."""
    pattern: Any = {"whitespace_pattern": r"( |\n {0,16})?"}
    if structure.kind == "json_object":
        return LLMatcher.grammar_from_json_schema('{"type": "object"}', overrides=pattern)
    if structure.kind == "json_schema":
        return LLMatcher.grammar_from_json_schema(structure.source, overrides=pattern)
    if structure.kind == "regex":
        return LLMatcher.grammar_from_regex(structure.source)
    if structure.kind == "choice":
        texts = " | ".join(json.dumps(text) for text in json.loads(structure.source))
        return LLMatcher.grammar_from_lark(f"start: {texts}")
    return LLMatcher.grammar_from_lark(structure.source)


@dataclass(frozen=True, eq=False)
class Reference:
    """A structure as a logits processor, as any program would write it."""

    structure: Structure
    tokens: LLTokenizer
    prompt_length: int

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        allowed = self.allowed(input_ids[0, self.prompt_length :].tolist())
        return scores.masked_fill(~torch.from_numpy(allowed), -torch.inf)

    def allowed(self, text: Sequence[int]) -> NDArray[np.bool_]:
        """[V]"""
        matcher = LLMatcher(self.tokens, definition(self.structure), log_level=0)
        assert matcher.consume_tokens(list(text))
        bits = np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8)
        assert not matcher.is_error()
        return np.unpackbits(bits, bitorder="little")[: self.tokens.vocab_size].astype(np.bool_)
