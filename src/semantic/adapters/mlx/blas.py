"""Loads OpenBLAS before MLX on Linux.

MLX's CPU build brings the reference BLAS, which computes fp32 matrix products up to 20 times
slower. Symbols already loaded win, so OpenBLAS must come first. Knows nothing of MLX but its
name.
"""

from __future__ import annotations

import ctypes
import sys
from typing import Literal

BlasStatus = Literal["openblas", "missing", "too late", "not needed"]

_LIBRARY = "libopenblas.so.0"


def load_openblas() -> BlasStatus:
    """Load OpenBLAS for MLX to use; says what came of it."""
    if sys.platform != "linux":
        return "not needed"
    if "mlx.core" in sys.modules:
        return "too late"
    try:
        ctypes.CDLL(_LIBRARY, mode=ctypes.RTLD_GLOBAL)
    except OSError:
        return "missing"
    return "openblas"
