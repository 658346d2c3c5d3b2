"""Measures of the repository itself: its lines, and what a recurrence costs."""
