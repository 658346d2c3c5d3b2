"""Beside `specrouter.bench`: other servers, published policies, traces, recorded texts."""
