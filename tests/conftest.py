"""Loads OpenBLAS before any test imports MLX; without it the suite takes many times as long."""

from __future__ import annotations

import os

import hypothesis

import semantic.adapters.mlx  # noqa: F401

hypothesis.settings.register_profile(
    "default", deadline=None, suppress_health_check=list(hypothesis.HealthCheck)
)
hypothesis.settings.register_profile(
    "thorough", parent=hypothesis.settings.get_profile("default"), max_examples=500
)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))
