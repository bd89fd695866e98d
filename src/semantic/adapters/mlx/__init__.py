"""Implements the engine's ports with MLX and mlx-lm. Only this folder imports them.

Importing this package loads OpenBLAS and sets MLX's environment variables. Both must happen before
`import mlx.core`.
"""

from __future__ import annotations

import ctypes
import os
import resource
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

BlasStatus = Literal["openblas", "missing", "too late", "not needed"]

_OPENBLAS = "libopenblas.so.0"


_LOADED: list[ctypes.CDLL] = []


def load_openblas() -> BlasStatus:
    """Load OpenBLAS for MLX's CPU backend on Linux. Call this before importing MLX. MLX's own BLAS
    is up to 20 times slower in fp32."""
    if sys.platform != "linux":
        return "not needed"
    if "mlx.core" in sys.modules:
        return "too late"
    try:
        _LOADED.append(ctypes.CDLL(_OPENBLAS, mode=ctypes.RTLD_GLOBAL))
    except OSError:
        return "missing"
    return "openblas"


def blas_kernel() -> str:
    """Return the release and core type of the loaded OpenBLAS, or "own" if it is not loaded."""
    if not _LOADED:
        return "own"
    config, core = _LOADED[0].openblas_get_config, _LOADED[0].openblas_get_corename
    config.restype = core.restype = ctypes.c_char_p
    release = b" ".join(config().split()[:2])
    return f"{release.decode()} {core().decode()}"


def keep_file_limit() -> None:
    """Keep `import mlx_lm` from lowering the limit on open files."""
    set_limits = resource.setrlimit

    def setrlimit(which: int, limits: tuple[int, int], /) -> None:
        caller = sys._getframe(1).f_globals  # noqa: SLF001  CPython has it
        if caller.get("__name__") != "mlx_lm.utils":
            set_limits(which, limits)
            return
        soft, hard = resource.getrlimit(which)
        if soft != resource.RLIM_INFINITY:
            most = limits[0] if hard == resource.RLIM_INFINITY else min(limits[0], hard)
            set_limits(which, (max(soft, most), hard))

    resource.setrlimit = setrlimit


DISTRIBUTION = "semantic-engine"
"""The package's name on package indexes; Python imports it as `semantic`."""

_RECEIPTS = {"uv-receipt.toml": "uv tool install", "pipx_metadata.json": "pipx install --force"}
"""Maps each installer's receipt file to the installer's command."""


def what_to_install() -> str:
    """Return a sentence with the command that installs what MLX needs on this platform."""
    install = _installer()
    if sys.platform == "linux":
        return (
            f"On Linux type: {install} '{DISTRIBUTION}[cpu]'; "
            f"with an NVIDIA GPU: {install} '{DISTRIBUTION}[cuda]'"
        )
    return f"Type: {install} {DISTRIBUTION}"


def extra_to_install(extra: str) -> str:
    """Return a sentence with the command that installs the extra `extra` of this package."""
    return f"Type: {_installer()} '{DISTRIBUTION}[{extra}]'"


def _installer() -> str:
    for receipt, command in _RECEIPTS.items():
        if Path(sys.prefix, receipt).exists():
            return command
    return "pip install" if find_spec("pip") is not None else "uv pip install"


if sys.platform == "linux":
    # MLX's CUDA backend ends a CUDA graph when the arrays that its kernels read exceed this limit.
    # Each layer reads the whole page pool, and one graph per layer would cost more than the layer.
    os.environ.setdefault("MLX_MAX_MB_PER_BUFFER", str(1 << 30))
    # MLX caches CUDA graphs by their topology and counts all misses since the process began. After
    # twice as many misses as the cache has entries, every miss is an error, however rare misses
    # are.
    os.environ.setdefault("MLX_ENABLE_CACHE_THRASHING_CHECK", "0")

BLAS_STATUS = load_openblas()
keep_file_limit()
