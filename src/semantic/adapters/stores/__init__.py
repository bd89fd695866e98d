"""Stores of KV cache blocks (memory, disk, both tiers, write-behind) and of small records."""
