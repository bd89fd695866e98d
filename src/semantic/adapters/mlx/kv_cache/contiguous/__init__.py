"""Caches in separate arrays: one buffer per sequence and layer, batched without padding."""
