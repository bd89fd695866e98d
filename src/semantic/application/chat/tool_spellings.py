"""Tools as they were written first: clients write the same ones in other orders of their keys.

A template writes keys as they come, before all messages: in another order everything behind them
would be computed again. Knows tools; no template and no tokens.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence

from semantic.domain.chat import Tool
from semantic.domain.digest import digest

_MOST_BYTES = 8 << 20
"""Of JSON; the tools of hundreds of clients."""


class ToolSpellings:
    """Remembers tools inside a budget of bytes; the last used stay. Any thread may call it."""

    def __init__(self, max_bytes: int = _MOST_BYTES) -> None:
        self._max_bytes = max_bytes
        self._tools: OrderedDict[bytes, tuple[Tool, int]] = OrderedDict()
        self._n_bytes = 0
        self._lock = threading.Lock()

    @property
    def n_bytes(self) -> int:
        """What is remembered."""
        return self._n_bytes

    def first(
        self, tools: Sequence[Tool], texts: Sequence[bytes], scope: bytes
    ) -> tuple[Tool, ...]:
        """`tools` in their order, each as it was written when it was first seen in `scope`;
        `texts` are what they say, in whatever order."""
        with self._lock:
            pairs = zip(tools, texts, strict=True)
            return tuple(self._first(tool, text, scope) for tool, text in pairs)

    def _first(self, tool: Tool, text: bytes, scope: bytes) -> Tool:
        key = digest("tool-v1", scope, text)
        known = self._tools.get(key)
        if known is not None:
            self._tools.move_to_end(key)
            return known[0]
        self._tools[key] = (tool, len(text))
        self._n_bytes += len(text)
        while self._n_bytes > self._max_bytes:
            _, (_, n_bytes) = self._tools.popitem(last=False)
            self._n_bytes -= n_bytes
        return tool
