"""Requests: their parameters, their state while they run, and their outputs."""
