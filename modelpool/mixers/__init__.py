"""Layers that keep a state for each row: one file for each arithmetic, and the registry."""
