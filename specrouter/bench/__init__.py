"""Benchmarks: contenders that take turns on the same prompts, and figures from their times.

The service does not import this package; the command line does so on demand.
"""
