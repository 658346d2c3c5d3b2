"""Policies in simulated time."""
