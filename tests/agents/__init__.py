"""Coding agents of other makers, as their makers publish them, against a started server.

Not part of the test suite: `make test-agents` runs them, for they are fetched from npm. What reads
their reports is tested with the rest.
"""
