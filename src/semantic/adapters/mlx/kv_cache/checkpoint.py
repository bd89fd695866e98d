"""Byte format of a checkpoint: a table of contents, then trees of arrays and numbers.

8 bytes   length of the table, little-endian
table     JSON: layout, length, and one tree per layer; an array is {dtype: shape}
arrays    in the order of the trees, each at a multiple of 64 bytes
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx

from semantic.adapters.mlx.arrays import Bytes, array_from
from semantic.domain.errors import CacheReconstructionError

_ALIGNMENT = 64
_LENGTH_BYTES = 8
_MOST_TABLE_BYTES = 1 << 22

_DTYPES = {
    str(dtype).removeprefix("mlx.core."): dtype
    for dtype in (
        mx.bool_,
        *(mx.uint8, mx.uint16, mx.uint32, mx.uint64),
        *(mx.int8, mx.int16, mx.int32, mx.int64),
        *(mx.float16, mx.bfloat16, mx.float32, mx.float64, mx.complex64),
    )
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


@dataclass(frozen=True, slots=True)
class ArrayForm:
    """Type and shape of an array. The axis `free_axis` may have any length above 0."""

    dtype: mx.Dtype
    shape: tuple[int, ...]
    free_axis: int | None = None

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.size

    def fits(self, other: ArrayForm) -> bool:
        """Return whether an array of the form `other` is acceptable in place of this form."""
        if self.dtype != other.dtype or len(self.shape) != len(other.shape):
            return False
        return all(
            found > 0 if axis == self.free_axis else found == size
            for axis, (size, found) in enumerate(zip(self.shape, other.shape, strict=True))
        )


@dataclass(frozen=True, slots=True)
class StoredArray:
    """An array in a checkpoint, as its form and views of its bytes."""

    form: ArrayForm
    data: Sequence[Bytes]

    def load(self) -> mx.array:
        """Return a copy of the array as an MLX array."""
        return array_from(b"".join(self.data), self.form.dtype, self.form.shape)


@dataclass(frozen=True, slots=True)
class Anything:
    """An expected form that matches any tree of arrays and numbers."""


Leaf = None | int | float | str | ArrayForm | StoredArray | Anything
Tree = Leaf | tuple["Tree", ...] | list["Tree"]
"""A layer's state, or a state's expected form. In an expected form, an int matches any int."""


def write_checkpoint(layout: str, length: int, trees: Sequence[Tree]) -> bytes:
    """Encode a checkpoint after `length` tokens. The arrays in `trees` are StoredArrays."""
    arrays: list[StoredArray] = []
    table = {"layout": layout, "length": length, "layers": [_to_json(t, arrays) for t in trees]}
    head = json.dumps(table, separators=(",", ":")).encode()
    parts: list[Bytes] = [len(head).to_bytes(_LENGTH_BYTES, "little"), head]
    at = _LENGTH_BYTES + len(head)
    for array in arrays:
        parts += [bytes(-at % _ALIGNMENT), *array.data]
        at += -at % _ALIGNMENT + array.form.nbytes
    return b"".join(parts)


def read_checkpoint(body: bytes, layout: str, length: int, expected: Sequence[Tree]) -> list[Tree]:
    """Decode a checkpoint's trees without loading arrays. Raises CacheReconstructionError for
    malformed bytes, or trees that do not match `expected`."""
    table, end = _table_of(body)
    for name, value in (("layout", layout), ("length", length)):
        if type(table.get(name)) is not type(value) or table[name] != value:
            raise CacheReconstructionError(f"checkpoint: {name} must be {value!r}")
    layers = table.get("layers")
    if not isinstance(layers, list) or len(layers) != len(expected):
        raise CacheReconstructionError(f"checkpoint: must have {len(expected)} layers")
    reader = _Reader(memoryview(body), end)
    trees = [reader.match(*pair) for pair in zip(layers, expected, strict=True)]
    reader.finish()
    return trees


def arrays_in(body: bytes) -> list[mx.array]:
    """Copy all arrays in a checkpoint. Raises CacheReconstructionError for malformed bytes."""
    table, end = _table_of(body)
    found: list[mx.array] = []
    waiting = [_Reader(memoryview(body), end).match(table.get("layers"), Anything())]
    while waiting:
        tree = waiting.pop()
        if isinstance(tree, StoredArray):
            found.append(tree.load())
        elif isinstance(tree, tuple | list):
            waiting += tree
    return found


def _table_of(body: bytes) -> tuple[dict[str, object], int]:
    end = _LENGTH_BYTES + int.from_bytes(body[:_LENGTH_BYTES], "little")
    if not _LENGTH_BYTES < end <= min(len(body), _MOST_TABLE_BYTES):
        raise CacheReconstructionError("checkpoint: has no table")
    return _parse(body[_LENGTH_BYTES:end]), end


def _parse(head: bytes) -> dict[str, object]:
    try:
        table: object = json.loads(head)
    except (ValueError, RecursionError) as error:
        raise CacheReconstructionError(f"checkpoint: the table is not JSON: {error}") from error
    if not isinstance(table, dict):
        raise CacheReconstructionError("checkpoint: the table is not an object")
    return table


def _to_json(tree: Tree, arrays: list[StoredArray]) -> object:
    if isinstance(tree, StoredArray):
        arrays.append(tree)
        return {_NAMES[tree.form.dtype]: list(tree.form.shape)}
    if isinstance(tree, tuple | list):
        return [_to_json(item, arrays) for item in tree]
    if isinstance(tree, ArrayForm | Anything):
        raise TypeError("a placeholder has no bytes")
    return tree


class _Reader:
    def __init__(self, body: memoryview, at: int) -> None:
        self._body = body
        self._at = at

    def match(self, found: object, expected: Tree) -> Tree:
        if isinstance(expected, Anything):
            return self._any(found)
        if isinstance(expected, ArrayForm):
            return self._take(found, expected)
        if isinstance(expected, tuple | list):
            if not isinstance(found, list) or len(found) != len(expected):
                raise CacheReconstructionError(f"checkpoint: expected {len(expected)} values")
            items = [self.match(*pair) for pair in zip(found, expected, strict=True)]
            return items if isinstance(expected, list) else tuple(items)
        if isinstance(expected, int) and type(found) is int:
            return found
        if found != expected or type(found) is not type(expected):
            raise CacheReconstructionError(f"checkpoint: expected {expected!r}")
        return expected

    def _any(self, found: object) -> Tree:
        if isinstance(found, list):
            return [self._any(item) for item in found]
        if isinstance(found, dict):
            form = _read_form(found)
            if form is None:
                raise CacheReconstructionError("checkpoint: an array has no dtype or shape")
            return self._take(found, form)
        if found is None or isinstance(found, int | float | str):
            return found
        raise CacheReconstructionError(f"checkpoint: cannot hold a {type(found).__name__}")

    def finish(self) -> None:
        if self._at != len(self._body):
            left = len(self._body) - self._at
            raise CacheReconstructionError(f"checkpoint: {left} bytes follow the last array")

    def _take(self, found: object, expected: ArrayForm) -> StoredArray:
        form = _read_form(found)
        if form is None or not expected.fits(form):
            raise CacheReconstructionError(
                f"checkpoint: expected {expected.dtype} of shape {expected.shape}"
            )
        start = self._at + -self._at % _ALIGNMENT
        stop = start + form.nbytes
        if stop > len(self._body):
            raise CacheReconstructionError("checkpoint: truncated")
        self._at = stop
        return StoredArray(form, [self._body[start:stop]])


def _read_form(found: object) -> ArrayForm | None:
    if not isinstance(found, dict) or len(found) != 1:
        return None
    ((name, shape),) = found.items()
    if name not in _DTYPES or not isinstance(shape, list):
        return None
    if not all(type(n) is int and n >= 0 for n in shape):
        return None
    return ArrayForm(_DTYPES[name], tuple(shape))
