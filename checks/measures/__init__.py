"""Measures of the repository itself: its structure, and its speed against another work tree."""
