"""ToolSpellings: the first JSON spelling of each tool, to render equal tools equally.

Clients send the same tools with their keys in different orders. A template renders keys in the
given order, before all messages, so another order would change every later token. Knows tools; no
template and no tokens.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence

from semantic.domain.chat import Tool
from semantic.domain.digest import digest

_MAX_BYTES = 8 << 20
"""Bytes of JSON: the tools of hundreds of clients."""


class ToolSpellings:
    """An LRU cache of tools, bounded in bytes. Thread-safe."""

    def __init__(self, max_bytes: int = _MAX_BYTES) -> None:
        self._max_bytes = max_bytes
        self._tools: OrderedDict[bytes, tuple[Tool, int]] = OrderedDict()
        self._n_bytes = 0
        self._lock = threading.Lock()

    @property
    def n_bytes(self) -> int:
        """Bytes of the cached tools."""
        return self._n_bytes

    def first(
        self, tools: Sequence[Tool], texts: Sequence[bytes], scope: bytes, *, keep: bool = True
    ) -> tuple[Tool, ...]:
        """`tools` in their order, each in its first spelling in `scope`.

        `texts` are the canonical texts of the tools, independent of the order of keys. Without
        `keep` new spellings are not recorded.
        """
        with self._lock:
            pairs = zip(tools, texts, strict=True)
            return tuple(self._first(tool, text, scope, keep=keep) for tool, text in pairs)

    def _first(self, tool: Tool, text: bytes, scope: bytes, *, keep: bool) -> Tool:
        key = digest("tool-v1", scope, text)
        known = self._tools.get(key)
        if known is not None:
            self._tools.move_to_end(key)
            return known[0]
        if not keep:
            return tool
        self._tools[key] = (tool, len(text))
        self._n_bytes += len(text)
        while self._n_bytes > self._max_bytes:
            _, (_, n_bytes) = self._tools.popitem(last=False)
            self._n_bytes -= n_bytes
        return tool
