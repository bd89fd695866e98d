"""Models by name: aliases, the cache of the Hugging Face hub, and the hub itself.

Knows about files and sizes; knows nothing about what a model computes.
"""
