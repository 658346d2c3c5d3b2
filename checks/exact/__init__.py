"""The exactness promises, checked against `transformers` through the public API alone.

`make exact` runs every check; each also runs by itself (`python -m checks.exact.prefix --help`)
and prints its figures as one JSON document on the last line.
"""
