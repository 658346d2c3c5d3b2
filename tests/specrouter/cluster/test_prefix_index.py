"""What was sent to a replica is matched from the beginning, in whole blocks, per salt."""

from hypothesis import given
from hypothesis import strategies as st

from specrouter.cluster.prefix_index import BLOCK_TOKENS, SentPrompts, block_keys

MANY = 10**6


def prompt(blocks: int, last: int = 0) -> list[int]:
    return [*range(blocks * BLOCK_TOKENS - 1), last] if blocks else []


def test_a_prompt_has_a_key_for_each_whole_block() -> None:
    assert block_keys(prompt(1)[:-1], None) == ()
    assert len(block_keys([*prompt(2), 5], None)) == 2
    assert block_keys(prompt(2), None)[0] == block_keys(prompt(2, last=9), None)[0]
    assert block_keys(prompt(1), None) != block_keys(prompt(1), "a")


def test_the_beginning_counts_as_far_as_it_was_sent_there() -> None:
    sent = SentPrompts()
    sent.note(block_keys(prompt(3), None), MANY)
    assert sent.matched_tokens(block_keys(prompt(3), None)) == 3 * BLOCK_TOKENS
    assert sent.matched_tokens(block_keys(prompt(3, last=9), None)) == 2 * BLOCK_TOKENS
    assert sent.matched_tokens(block_keys(prompt(3), "other")) == 0


def test_what_was_sent_longest_ago_is_forgotten() -> None:
    sent = SentPrompts()
    old, new = block_keys(prompt(2), "old"), block_keys(prompt(2), "new")
    sent.note(old, 3 * BLOCK_TOKENS)
    sent.note(new, 3 * BLOCK_TOKENS)
    assert sent.matched_tokens(new) == 2 * BLOCK_TOKENS
    assert sent.matched_tokens(old) == 0, "its first block has gone"


@given(st.lists(st.integers(0, 5), min_size=1, max_size=3 * BLOCK_TOKENS), st.integers(0, 400))
def test_no_more_is_matched_than_is_alike(tokens: list[int], cut: int) -> None:
    sent = SentPrompts()
    sent.note(block_keys(tokens, None), MANY)
    other = [*tokens[:cut], 7, *tokens[cut:]]
    alike = min(cut, len(tokens))
    assert sent.matched_tokens(block_keys(other, None)) <= alike
