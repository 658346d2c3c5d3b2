"""The decoding loop: its requests, its queue and its thread."""
