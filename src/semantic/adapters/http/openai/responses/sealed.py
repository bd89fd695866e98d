"""Thoughts that a client carries without reading them: it sends them back as they are.

They are not secret: what protects them is that only the conversation's own client has them.
"""

from __future__ import annotations

import base64
from binascii import Error as Base64Error
from typing import Final

_MARK: Final = "semantic.thought."


def sealed(thought: str) -> str:
    """`thought` as what stands in `encrypted_content`."""
    data = thought.encode("utf-8", "surrogatepass")
    return _MARK + base64.urlsafe_b64encode(data).decode("ascii")


def opened(given: str) -> str:
    """The thought in it; nothing where somebody else made it, or where it broke on its way."""
    if not given.startswith(_MARK):
        return ""
    try:
        data = base64.urlsafe_b64decode(given.removeprefix(_MARK))
        return data.decode("utf-8", "surrogatepass")
    except (Base64Error, ValueError):
        return ""
