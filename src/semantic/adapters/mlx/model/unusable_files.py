"""Says what is wrong with files that are not a whole model for MLX, and how to mend it."""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, Final

from semantic.adapters.mlx.model.fingerprint import weight_files

_GGUF: Final = ".gguf"
_CONFIG: Final = "config.json"
_MAGIC: Final = b"GGUF"
_SIZES: Final = (1, 1, 2, 2, 4, 4, 4, 1, None, None, 8, 8, 8)
"""The bytes of a value of GGUF, by its type; None for texts and arrays."""
_TEXT: Final = 8
_MOST_BYTES: Final = 1 << 12
"""The longest text of interest in a GGUF file, and the highest number of fields."""
_MOST_HEADER: Final = 100 << 20
"""The format's limit on a header of weights."""
_TOKENIZERS: Final = ("tokenizer.json", "tokenizer.model", "vocab.json", "*.tiktoken", "*.model")
_QUANTIZED: Final = re.compile(r"[.-](I?Q\d|B?F\d|UD-)", re.IGNORECASE)
"""Begins what a GGUF file's name says beyond the model's."""
_CACHED: Final = "models--"
"""Begins the name of a model's folder in the hub's cache."""


def describe_gguf(path: Path) -> str:
    """Explain that `path`, a GGUF file or a folder with one, is not a model for MLX."""
    file = path if path.is_file() else min(path.glob(f"*{_GGUF}"))
    fields = dict(_fields(file))
    known = [fields[name] for name in ("general.architecture", "general.name") if name in fields]
    kind = f" ({', '.join(known)})" if known else ""
    words = _QUANTIZED.split(file.stem)[0]
    return (
        f"{file} is a GGUF file{kind}: MLX does not load llama.cpp's format; "
        f"`semantic models search {words}` finds conversions for MLX, and "
        "`mlx_lm.convert --hf-path ORG/NAME -q` converts the original weights"
    )


def is_gguf(path: Path) -> bool:
    """Return whether `path` is a GGUF file, or a folder with GGUF files and no other weights."""
    if path.is_dir():
        return any(path.glob(f"*{_GGUF}")) and not any(path.glob("*.safetensors"))
    return path.suffix == _GGUF and path.is_file()


def find_problem(folder: Path) -> str | None:
    """Return which file of the model in `folder` is unusable, and how to mend it; None if all look
    whole, or if it is an adapter. Reads no weights."""
    try:
        return next(_problems(folder), None) if (folder / _CONFIG).is_file() else None
    except OSError as error:
        return str(error)


def _problems(folder: Path) -> Iterator[str]:
    mend = _mend(folder)
    for name in (_CONFIG, "tokenizer.json", "tokenizer_config.json"):
        path = folder / name
        try:
            if path.is_file():
                json.loads(path.read_bytes())
        except (ValueError, RecursionError) as error:
            yield f"{path} is not valid JSON: {error}; {mend}"
    files = weight_files(folder)
    if not files:
        yield f"{folder} has no model*.safetensors; {mend}"
    for path in files:
        size, expected = path.stat().st_size, _expected_bytes(path)
        if size < expected:
            yield f"{path} has {size} of {expected} bytes; {mend}"
    if not any(any(folder.glob(pattern)) for pattern in _TOKENIZERS):
        yield f"{folder} has no tokenizer.json; {mend}"


def _mend(folder: Path) -> str:
    name = folder.parent.parent.name
    if not name.startswith(_CACHED):
        return "copy it again from where the model comes from"
    hub_id = name.removeprefix(_CACHED).replace("--", "/")
    return f"`semantic models pull {hub_id}` completes it"


def _expected_bytes(path: Path) -> int:
    """Return the bytes that the header of weights asks for."""
    with path.open("rb") as file:
        n_header = int.from_bytes(file.read(8), "little")
        header = file.read(n_header) if n_header <= _MOST_HEADER else b""
    if len(header) < n_header or not header:
        return 8 + n_header
    try:
        ends = [
            one["data_offsets"][1] for key, one in json.loads(header).items() if key[:2] != "__"
        ]
        return 8 + n_header + int(max([0, *ends]))
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return 0  # damaged, not cut short: the reader says how


def _fields(path: Path) -> Iterator[tuple[str, str]]:
    """Yield the texts at the beginning of a GGUF file, by their names."""
    try:
        with path.open("rb") as file:
            magic, _, _, n_fields = struct.unpack("<4sIQQ", file.read(24))
            if magic != _MAGIC:
                return
            for _ in range(min(n_fields, _MOST_BYTES)):
                name = _text(file)
                (kind,) = struct.unpack("<I", file.read(4))
                if kind == _TEXT:
                    yield name, _text(file)
                elif kind < len(_SIZES) and (size := _SIZES[kind]) is not None:
                    file.seek(size, 1)
                else:
                    return  # an array: the names come before
    except (OSError, ValueError, struct.error):
        return


def _text(file: BinaryIO) -> str:
    (n_bytes,) = struct.unpack("<Q", file.read(8))
    if n_bytes > _MOST_BYTES:
        raise ValueError(f"a text must have at most {_MOST_BYTES} bytes, got {n_bytes}")
    found = file.read(n_bytes).decode()
    return found if found.isprintable() else ascii(found)
