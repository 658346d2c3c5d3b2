"""Objectives: which requests take part in a cycle, and which draft tokens are verified."""
