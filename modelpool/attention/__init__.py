"""Attention over the key-value store."""
