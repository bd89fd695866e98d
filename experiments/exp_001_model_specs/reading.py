"""Builds one model from its configuration and extracts its spec; prints both cost and spec as JSON.

A separate process, because peak memory cannot be reset. No weight is ever evaluated. Run:
python -m experiments.exp_001_model_specs.reading NAME
"""

from __future__ import annotations

import importlib
import json
import resource
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import cast

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx.utils import tree_flatten

import semantic
from experiments.exp_001_model_specs.configurations import CONFIGURATIONS


def build(name: str) -> Module:
    """The model with mlx-lm's own class, at 16 bit as its checkpoint is; nothing is computed."""
    configuration = CONFIGURATIONS[name]
    module = importlib.import_module(f"mlx_lm.models.{configuration['model_type']}")
    model = cast(Module, module.Model(module.ModelArgs.from_dict(configuration)))
    model.set_dtype(mx.bfloat16)
    return model


def peak_memory() -> int:
    """Most bytes this process ever had resident."""
    status = Path("/proc/self/status")
    if status.exists():
        # Not ru_maxrss: on Linux that also counts the process this one was started from.
        lines = status.read_text(encoding="ascii").splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most * 1024


def weight_bytes(model: Module) -> int:
    """What the weights would take."""
    weights = cast("Callable[[], object]", model.parameters)()
    leaves = cast("list[tuple[str, mx.array]]", tree_flatten(weights))
    return sum(weight.nbytes for _, weight in leaves)


def main(name: str) -> None:
    """Read one model's spec."""
    peak_before = peak_memory()
    started = time.perf_counter()
    model = build(name)
    spec = semantic.ModelCacheSpec.from_model(model)
    found = {
        "seconds": time.perf_counter() - started,
        "layers": [asdict(layer) for layer in spec.layers],
        "weight_bytes": weight_bytes(model),
        "mlx_peak_bytes": mx.get_peak_memory(),
        "rss_before_bytes": peak_before,
        "rss_peak_bytes": peak_memory(),
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1])
