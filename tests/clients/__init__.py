"""Clients of other makers, each in an environment of its own, against a started server.

Not part of the test suite: `make test-clients` runs them, for they need packages of their own.
"""
