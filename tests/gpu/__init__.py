"""Tests of what only a GPU computes."""
