"""Blocks, prefixes and requests. Standard library only: no arrays, no I/O, no clock."""
