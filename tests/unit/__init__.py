"""Tests that need no framework."""
