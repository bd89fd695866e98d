"""Replicas run by Ray Serve. Only `ray_cluster` imports Ray."""
