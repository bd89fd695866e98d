"""Tests on the real mlx-lm."""
