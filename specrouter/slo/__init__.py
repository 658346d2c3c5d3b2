"""Objectives: admission, the requests that take part in a cycle, and the verified nodes."""
