"""Routing: the choice of the chain that drafts for each request, and when to make it anew."""
