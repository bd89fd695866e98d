"""A page as the target of a body: written in host memory, then copied to its place on the device.

Knows where a body's bytes are in a page; neither stores nor sequences.
"""

from __future__ import annotations

from collections.abc import Sequence

from semantic.adapters.mlx.kv_cache.paged.host_pages import token_bytes
from semantic.adapters.mlx.kv_cache.paged.kinds import PageKind
from semantic.adapters.mlx.kv_cache.paged.page_pool import Loan
from semantic.adapters.mlx.transfer.driver import Rows
from semantic.adapters.mlx.transfer.transfers import Transfers
from semantic.domain.errors import BackendError
from semantic.domain.value_objects import BLOCK_TOKENS


def page_rows(kind: PageKind, n_tokens: int) -> Sequence[Rows]:
    """The first tokens of every head of every layer in a page: the rows of a body."""
    if n_tokens == BLOCK_TOKENS:
        return [Rows(1, kind.page_bytes, kind.page_bytes)]
    heads, n_layers = kind.shape.kv_heads, len(kind.layers)
    keys, values = token_bytes(kind)
    if keys == values:  # the same rows as below, in one copy
        return [Rows(n_layers * 2 * heads, n_tokens * keys, BLOCK_TOKENS * keys)]
    rows: list[Rows] = []
    at = 0
    for width in (keys, values) * n_layers:
        rows.append(Rows(heads, n_tokens * width, BLOCK_TOKENS * width, at))
        at += heads * BLOCK_TOKENS * width
    return rows


class PageTarget:
    """Implements `BodyTarget` for a page of which a body has all the layers."""

    def __init__(self, transfers: Transfers, page: Loan, kind: PageKind) -> None:
        self._transfers = transfers
        self._page = page
        self._kind = kind
        self._memory: memoryview | None = None

    def put(self, body: bytes | memoryview) -> None:
        """See `BodyTarget.put`."""
        self._send(body, len(body) * BLOCK_TOKENS // self._kind.page_bytes)
        self.close()

    def open(self) -> list[memoryview]:
        """See `BodyTarget.open`."""
        try:
            self._memory = self._transfers.memory.take(self._kind.page_bytes)
        except MemoryError as error:
            raise BackendError(str(error)) from error
        return [self._memory]

    def close(self, n_tokens: int = 0) -> None:
        """See `BodyTarget.close`."""
        memory, self._memory = self._memory, None
        try:
            if memory is not None and n_tokens:
                self._send(memory, n_tokens)
        finally:
            self._page.end()

    def _send(self, data: bytes | memoryview, n_tokens: int) -> None:
        rows = page_rows(self._kind, n_tokens)
        if sum(one.nbytes for one in rows) > len(data):
            raise BackendError(f"a body of {len(data)} bytes has no {n_tokens} tokens")
        try:
            self._transfers.send(data, self._page, rows)
        except RuntimeError as error:
            raise BackendError(str(error)) from error
