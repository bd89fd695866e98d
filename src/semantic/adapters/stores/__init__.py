"""Stores of KV cache blocks, in memory and on disk, and of small records."""
