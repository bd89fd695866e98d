"""Tiny models of every architecture of mlx-lm: exact answers, and how much of them is reused."""
