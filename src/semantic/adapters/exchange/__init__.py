"""Agents as files that are carried from one store to another."""
