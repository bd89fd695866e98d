"""MLX and mlx-lm behind the ports; the only folder that imports them.

OpenBLAS must be loaded before the first `import mlx.core`, so it happens here, before any module
of this folder is executed. So must what MLX reads from its environment.
"""

import os
import sys

from semantic.adapters.mlx.blas import load_openblas

if sys.platform == "linux":
    # MLX's CUDA backend ends a CUDA graph when the arrays that its kernels read exceed this, and
    # each layer reads the whole pool of pages: one graph per layer would cost more than the layer.
    os.environ.setdefault("MLX_MAX_MB_PER_BUFFER", str(1 << 30))

BLAS_STATUS = load_openblas()
