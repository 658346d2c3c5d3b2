"""When stages of an output have ended, told of all its tokens at once."""

from collections.abc import Sequence

from specrouter.request.objective import Stage


def stage_ends(stages: Sequence[Stage], token_ids: Sequence[int]) -> tuple[int, ...]:
    """After how many output tokens each stage ended, of those that have; the next one goes on."""
    ends: list[int] = []
    for stage in stages[:-1]:
        began = ends[-1] if ends else 0
        if stage.until_tokens is not None:
            end = began + stage.until_tokens
        elif stage.until_token is not None and stage.until_token in token_ids[began:]:
            end = began + list(token_ids[began:]).index(stage.until_token) + 1
        else:
            break
        if end > len(token_ids):
            break
        ends.append(end)
    return tuple(ends)
