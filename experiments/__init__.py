"""Experiments: each folder asks one question and keeps its answer. Nothing imports this package."""

import semantic.adapters.mlx  # noqa: F401  loads OpenBLAS, which must come before any `import mlx.core`
