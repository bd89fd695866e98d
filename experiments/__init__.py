"""Experiments: each folder asks one question and keeps its answer. Nothing imports this package."""
