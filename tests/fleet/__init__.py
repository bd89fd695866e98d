"""Replicas over a real S3 server: `make test-fleet`. Not part of `make test`."""
