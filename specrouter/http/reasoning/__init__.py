"""Reasoning in answers: which text of an output is thought, which is said, and which calls."""
