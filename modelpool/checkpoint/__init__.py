"""What lies on disk: sources, sizes, tokenizers, architectures."""
