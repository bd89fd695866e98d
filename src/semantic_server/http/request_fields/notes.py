"""Notes in place of content that a text model cannot process.

Equal content gets an equal note, so prompts keep a common beginning.
"""

from __future__ import annotations

import base64
import hashlib
import re
import struct
from binascii import Error as Base64Error
from collections.abc import Iterator, Mapping
from typing import Final

from semantic.domain.chat import Attachment

_TEXT_ONLY: Final = "this model reads text only"
_HEAD: Final = 1 << 16
"""The number of bytes of a picture in which to look for its size."""
_KB: Final = 1000
_SHORTEST: Final = 24
"""The minimum number of characters of base64. A shorter text is a name."""
_LONGEST_NOTE: Final = 4000
_LONGEST_NAME: Final = 80
_DATA_URL: Final = re.compile(r"data:(?P<type>[\w.+-]+/[\w.+-]+)?[^,]*;base64,", re.ASCII)
_FORMATS: Final = {b"\x89PNG": "PNG", b"\xff\xd8": "JPEG", b"GIF8": "GIF", b"RIFF": "WebP"}
_MARKER: Final = 0xFF
_SIZE_FRAMES: Final = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
"""JPEG's markers of frames that contain the picture's size."""
_SAID: Final = (
    "text", "title", "url", "name", "tool_name", "query", "code", "stdout", "stderr", "content",
)  # fmt: skip
"""Members that contain text, in blocks of other services."""


def picture(source: str) -> tuple[str, Attachment]:
    """Return the note and the attachment for a picture. `source` is base64, a URL or a name."""
    found = _DATA_URL.match(source[:200])
    data = source if found is None else source[found.end() :]
    head = _decoded(data[: _HEAD * 4 // 3])
    if head is None:
        what = "image that is not in the request" if found is None else "image"
    else:
        what = f"image, {_described(head) or _size(data)}"
    return _note(what, data)


def attachment(kind: str, name: str, data: str) -> tuple[str, Attachment]:
    """Return the note and the attachment for a sound or document as base64, a URL or an id."""
    found = _DATA_URL.match(data[:200])
    if found is not None:
        name, data = name or found["type"] or "", data[found.end() :]
    size = _size(data) if _decoded(data[:64]) is not None else ""
    return _note(", ".join(filter(None, (kind, name[:_LONGEST_NAME], size))), data)


def file_note(file: Mapping[str, object]) -> tuple[str, Attachment]:
    """Return the note and the attachment for a file in OpenAI's form."""
    fields = ("file_data", "file_url", "file_id")
    data = next((one for one in map(file.get, fields) if isinstance(one, str)), "")
    return attachment("document", str(file.get("filename", "")), data)


def block_note(kind: str, block: object) -> str:
    """Return a note with the texts of a block. Only another service can process the block."""
    said = " | ".join(_texts(block))
    shown = said if len(said) <= _LONGEST_NOTE else said[:_LONGEST_NOTE] + "..."
    return f"[{kind[:_LONGEST_NAME]}: {shown}]" if shown else f"[{kind[:_LONGEST_NAME]}]"


def _note(what: str, data: str) -> tuple[str, Attachment]:
    digest = hashlib.blake2b(data.encode("utf-8", "surrogatepass"), digest_size=16).digest()
    return f"[{what}: {_TEXT_ONLY}]", Attachment(what, digest)


def _decoded(data: str) -> bytes | None:
    if len(data) < _SHORTEST:
        return None
    try:
        return base64.b64decode(data[: len(data) // 4 * 4], validate=True) or None
    except (Base64Error, ValueError):
        return None


def _size(data: str) -> str:
    n_bytes = len(data) * 3 // 4
    return f"{n_bytes} bytes" if n_bytes < _KB else f"{n_bytes // _KB} kB"


def _described(head: bytes) -> str:
    """Return the size and format of a picture, as in `1024 x 768 PNG`."""
    name = next((name for magic, name in _FORMATS.items() if head.startswith(magic)), "")
    if not name or (name == "WebP" and head[8:12] != b"WEBP"):
        return ""
    try:
        width, height = _SIZES[name](head)
    except (struct.error, IndexError, LookupError):
        return name
    return f"{width} x {height} {name}"


def _png(head: bytes) -> tuple[int, int]:
    width, height = struct.unpack_from(">II", head, 16)
    return width, height


def _gif(head: bytes) -> tuple[int, int]:
    width, height = struct.unpack_from("<HH", head, 6)
    return width, height


def _jpeg(head: bytes) -> tuple[int, int]:
    at = 2
    while head[at] == _MARKER:
        marker, size = head[at + 1], struct.unpack_from(">H", head, at + 2)[0]
        if marker in _SIZE_FRAMES:
            height, width = struct.unpack_from(">HH", head, at + 5)
            return width, height
        at += 2 + max(size, 2)
    raise LookupError("no frame")


def _webp(head: bytes) -> tuple[int, int]:
    match head[12:16]:
        case b"VP8 ":
            width, height = struct.unpack_from("<HH", head, 26)
            return width & 0x3FFF, height & 0x3FFF
        case b"VP8L":
            (bits,) = struct.unpack_from("<I", head, 21)
            return (bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1
        case _:
            low, high = head[24:27], head[27:30]
            return int.from_bytes(low, "little") + 1, int.from_bytes(high, "little") + 1


_SIZES: Final = {"PNG": _png, "JPEG": _jpeg, "GIF": _gif, "WebP": _webp}


def _texts(value: object) -> Iterator[str]:
    if isinstance(value, list):
        for one in value:
            yield from _texts(one)
    elif isinstance(value, Mapping):
        for name, one in value.items():
            if isinstance(one, str) and one and name in _SAID:
                yield one
            elif not isinstance(one, str):
                yield from _texts(one)
