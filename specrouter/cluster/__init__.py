"""Replicas: which replica serves a request, and how the request continues if one is lost."""
