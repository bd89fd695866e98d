"""Blocks, prefixes and values, alone."""
