"""Parsers that split an output into reasoning, content and tool calls."""
