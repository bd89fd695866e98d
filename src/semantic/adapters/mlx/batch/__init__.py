"""Continuous batching: sequences join and leave the decode batch between steps."""
