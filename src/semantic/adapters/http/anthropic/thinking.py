"""Signatures of thinking blocks, which clients return unread with the block.

They authenticate nothing. If the request omits thinking from the reply, the signature carries its
text, so that the next prompt can contain it.
"""

from __future__ import annotations

import base64
import hashlib
from binascii import Error as Base64Error
from typing import Final

_SEAL: Final = "semantic.seal."
_TEXT: Final = "semantic.text."


def signature_of(thought: str) -> str:
    """The signature of a thinking block sent with its text; deterministic."""
    return _SEAL + _encoded(hashlib.sha256(_utf8(thought)).digest())


def signature_with_text(thought: str) -> str:
    """The signature of a thinking block sent without its text: contains the text."""
    return _TEXT + _encoded(_utf8(thought))


def thinking_text(shown: str, signature: str) -> str:
    """The text of a returned block: `shown`, or the text in the signature if `shown` is empty."""
    if shown or not signature.startswith(_TEXT):
        return shown
    try:
        data = base64.urlsafe_b64decode(signature.removeprefix(_TEXT))
        return data.decode("utf-8", "surrogatepass")
    except (Base64Error, ValueError):
        return shown  # another server's, or corrupted


def _encoded(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).decode("ascii")


def _utf8(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")
