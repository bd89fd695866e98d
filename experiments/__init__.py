"""Experiments: each folder answers one question. Nothing imports this package."""

import semantic.adapters.mlx  # noqa: F401  loads OpenBLAS, which must come before any `import mlx.core`
