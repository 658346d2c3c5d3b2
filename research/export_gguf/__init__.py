"""Checkpoints in other programs' formats."""
