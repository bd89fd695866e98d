"""Thoughts on the wire: their signatures, and what a request says about thinking.

Clients send a thought back with its signature, unread. It proves nothing here; where a client
asked not to be shown thoughts it carries the thought, so that the next prompt can have it.
"""

from __future__ import annotations

import base64
import hashlib
from binascii import Error as Base64Error
from typing import Final

_SEAL: Final = "semantic.seal."
_TEXT: Final = "semantic.text."


def signature_of(thought: str) -> str:
    """The signature of a thought that the client is shown: the same for the same text."""
    return _SEAL + _encoded(hashlib.sha256(_utf8(thought)).digest())


def signature_with_text(thought: str) -> str:
    """The signature of a thought that the client is not shown: it holds it."""
    return _TEXT + _encoded(_utf8(thought))


def thinking_text(shown: str, signature: str) -> str:
    """The thought that came back; `shown` unless only the signature has it."""
    if shown or not signature.startswith(_TEXT):
        return shown
    try:
        data = base64.urlsafe_b64decode(signature.removeprefix(_TEXT))
        return data.decode("utf-8", "surrogatepass")
    except (Base64Error, ValueError):
        return shown  # somebody else's, or broken on its way


def _encoded(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).decode("ascii")


def _utf8(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")
