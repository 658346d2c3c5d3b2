"""Checks that take minutes, a GPU, Ray or environments of their own; `make help` lists them."""
