"""Benchmarks: both sides of every claim in one run. Not part of the package."""
