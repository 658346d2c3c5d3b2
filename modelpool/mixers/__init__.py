"""Layers that keep a state of each row: a file for each arithmetic, and the registry."""
