"""Checkpoints on disk: sources, sizes, tokenizers, architectures."""
