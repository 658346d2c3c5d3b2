"""A cluster of simulated replicas and pairs, routed by the policies of `specrouter.cluster`."""
