"""Caches in separate arrays: one buffer per sequence and layer, batched without padding.

A layer that cannot use these caches keeps mlx-lm's own cache.
"""
