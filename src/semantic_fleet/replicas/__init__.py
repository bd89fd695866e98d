"""Replicas that Ray Serve runs. Only `ray_cluster` imports Ray."""
