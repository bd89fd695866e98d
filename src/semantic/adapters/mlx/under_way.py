"""`begin`: let arrays be computed, and go on. MLX gives its own function no types."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import mlx.core as mx

begin = cast(Callable[..., None], mx.async_eval)
