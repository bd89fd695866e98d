"""How the states of a text's tokens become its vector, as the files beside a model declare it.

These are the files of sentence-transformers: most embedding models have them. Knows declarations
and arrays; no model.
"""

from __future__ import annotations

import json
from array import array
from pathlib import Path
from typing import Final, Literal, cast

import mlx.core as mx

from semantic.domain.errors import NotFiniteError, UnsupportedModelError
from semantic.ports.embedding import Vector

Pooling = Literal["last", "mean", "first"]

_DECLARED: Final[dict[str, Pooling]] = {
    "pooling_mode_lasttoken": "last",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_cls_token": "first",
}
_FILE: Final = Path("1_Pooling", "config.json")
_MODULES: Final = "modules.json"
_KNOWN_MODULES: Final = frozenset({"Transformer", "Pooling", "Normalize"})
_MAX_BYTES: Final = 1 << 20


def read_pooling(folder: Path, default: Pooling) -> Pooling:
    """The pooling that `folder` declares, `default` if it declares none.

    Raises UnsupportedModelError for one that is not supported, and for a layer after it.
    """
    modules = _read(folder / _MODULES)
    kinds = (
        [str(one.get("type", "")) for one in modules if isinstance(one, dict)]
        if isinstance(modules, list)
        else []
    )
    for kind in kinds:
        if kind.rpartition(".")[2] not in _KNOWN_MODULES:
            raise UnsupportedModelError(f"{folder / _MODULES}: {kind!r:.80} is not supported")
    declared = _read(folder / _FILE)
    if not isinstance(declared, dict):
        return default
    modes = [
        name for name, value in declared.items() if name.startswith("pooling_") and value is True
    ]
    if len(modes) != 1 or modes[0] not in _DECLARED:
        known = ", ".join(_DECLARED)
        raise UnsupportedModelError(f"{folder / _FILE}: expected one of {known}, got {modes}")
    return _DECLARED[modes[0]]


def pool(states: mx.array, positions: mx.array, lengths: mx.array, pooling: Pooling) -> mx.array:
    """The states that count in each row's vector, added up: (rows, width).

    `states` (rows, columns, width) are those at `positions` (1, columns) of rows with `lengths`
    (rows,); what pads a row does not count.
    """
    ends = lengths[:, None]
    match pooling:
        case "last":
            taken = positions == ends - 1
        case "first":
            taken = (positions == 0) & (ends > 0)
        case "mean":
            taken = positions < ends
    return mx.sum(states.astype(mx.float32) * taken.astype(mx.float32)[:, :, None], axis=1)


def vectors_of(sums: mx.array) -> tuple[Vector, ...]:
    """The rows of `sums` (rows, width), made of length 1. Raises NotFiniteError."""
    norms = mx.linalg.norm(sums, axis=-1, keepdims=True)
    rows = sums / mx.maximum(norms, 1e-12)
    if not mx.all(mx.isfinite(rows)).item():
        raise NotFiniteError
    return tuple(array("f", row) for row in cast("list[list[float]]", rows.tolist()))


def read_length(folder: Path) -> int | None:
    """The longest text in tokens that `folder` declares; None if it declares none."""
    found = _read(folder / "sentence_bert_config.json")
    most = found.get("max_seq_length") if isinstance(found, dict) else None
    return most if type(most) is int and most > 0 else None


def _read(path: Path) -> object:
    """The JSON in a file; None if there is none. Raises UnsupportedModelError for another file."""
    try:
        if path.stat().st_size > _MAX_BYTES:
            raise UnsupportedModelError(f"{path} is longer than {_MAX_BYTES} bytes")
        found: object = json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:
        raise UnsupportedModelError(f"cannot read {path}: {error}") from error
    return found
