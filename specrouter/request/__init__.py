"""Requests: what callers ask, what a running request is, and what it brings."""
