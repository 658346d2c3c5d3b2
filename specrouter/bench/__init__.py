"""Benchmarks: contenders that take turns on the same prompts, and what their times say.

Nothing of the service imports this package; the command line does, when it is asked to.
"""
