"""Replicas: which of them a request goes to, and how it goes on where one is lost."""
