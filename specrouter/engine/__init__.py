"""The decoding loop: its requests, queue and thread."""
