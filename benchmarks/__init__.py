"""Benchmarks: each compares both sides of a claim in one run. Not part of the package."""
