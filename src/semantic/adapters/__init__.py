"""Implementations of the outbound ports, one folder per technology."""
