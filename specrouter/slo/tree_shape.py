"""The bounds of a draft tree's shape. Pure arithmetic."""

from specrouter.request.params import MAX_TREE_TOKENS


def fitting_width(depth: int, width: int) -> int:
    """The width, or the most with which a tree of this depth stays within MAX_TREE_TOKENS."""
    return max(1, min(width, MAX_TREE_TOKENS // depth))
