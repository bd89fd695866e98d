"""MLX and mlx-lm behind the ports; the only folder that imports them.

`kv_cache` holds caches and their stored bytes, `batch` decodes, `sampling` draws tokens, `text` and
`model` deal with tokenizers and weights; `backend` puts them together. Importing this package loads
OpenBLAS and sets what MLX reads from its environment: both must precede `import mlx.core`.
"""

from __future__ import annotations

import ctypes
import os
import sys
from typing import Literal

BlasStatus = Literal["openblas", "missing", "too late", "not needed"]

_OPENBLAS = "libopenblas.so.0"


def load_openblas() -> BlasStatus:
    """Load OpenBLAS on Linux, so that MLX's CPU backend uses it.

    MLX's wheels link the reference BLAS, whose fp32 matrix products are up to 20 times slower.
    The dynamic linker uses the symbols that were loaded first.
    """
    if sys.platform != "linux":
        return "not needed"
    if "mlx.core" in sys.modules:
        return "too late"
    try:
        ctypes.CDLL(_OPENBLAS, mode=ctypes.RTLD_GLOBAL)
    except OSError:
        return "missing"
    return "openblas"


if sys.platform == "linux":
    # MLX's CUDA backend ends a CUDA graph when the arrays that its kernels read exceed this limit.
    # Each layer reads the whole page pool: a graph per layer would cost more than the layer.
    os.environ.setdefault("MLX_MAX_MB_PER_BUFFER", str(1 << 30))
    # It caches CUDA graphs by their topology, and counts the misses of the process's whole life:
    # beyond twice the cache's size every miss is an error, however rare misses are.
    os.environ.setdefault("MLX_ENABLE_CACHE_THRASHING_CHECK", "0")

BLAS_STATUS = load_openblas()
