"""Replicas over a real S3 server, on Ray and behind routers: `make test-fleet`, no `make test`."""
