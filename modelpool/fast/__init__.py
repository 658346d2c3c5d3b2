"""Faster forwards and linear layers than those of transformers."""
