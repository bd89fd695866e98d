"""Adapter for MLX and mlx-lm; the only package that imports them.

OpenBLAS must be loaded, and MLX's environment variables set, before the first `import mlx.core`.
Importing this package does both before any of its modules runs.
"""

import os
import sys

from semantic.adapters.mlx.blas import load_openblas

if sys.platform == "linux":
    # MLX's CUDA backend ends a CUDA graph when the arrays that its kernels read exceed this. Each
    # layer reads the whole page pool: a graph per layer would cost more than the layer itself.
    os.environ.setdefault("MLX_MAX_MB_PER_BUFFER", str(1 << 30))

BLAS_STATUS = load_openblas()
