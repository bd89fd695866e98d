"""MLX and mlx-lm behind the ports; the only folder that imports them.

OpenBLAS must be loaded before the first `import mlx.core`, so it happens here, before any module
of this folder is executed.
"""

from semantic.adapters.mlx.blas import load_openblas

BLAS_STATUS = load_openblas()
