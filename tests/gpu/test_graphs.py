"""CUDA graphs of more topologies than MLX caches: a server that runs for weeks meets them."""

from __future__ import annotations

import os
import subprocess
import sys

import mlx.core as mx
import pytest

pytestmark = pytest.mark.process

SUMS = """
import semantic.adapters.mlx
import mlx.core as mx

one = mx.ones((4, 4))
for n in range(1, 40):
    total = one
    for _ in range(n):
        total = total + one
    mx.eval(total)
    assert total[0, 0].item() == n + 1
"""


@pytest.mark.skipif(not mx.cuda.is_available(), reason="CUDA graphs need CUDA")
def test_more_graphs_than_are_cached_are_no_error() -> None:
    few = {**os.environ, "MLX_CUDA_GRAPH_CACHE_SIZE": "2"}
    done = subprocess.run(
        [sys.executable, "-c", SUMS], env=few, capture_output=True, text=True, check=False
    )
    assert not done.returncode, done.stderr
