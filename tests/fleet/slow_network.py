"""A network between a client and a server on this machine: late, slow, or cut.

Passes bytes on; knows nothing of what they say.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass

_READ = 1 << 16
_Piece = tuple[float, bytes]
"""When it arrives, by the loop's clock, and what it is; nothing at the end."""


@dataclass(slots=True)
class SlowNetwork:
    """What lies between; each may be changed at any time."""

    port: int
    """Of the server."""
    delay: float = 0.0
    """Seconds until a byte arrives, in each direction."""
    bytes_per_second: float | None = None
    """Of each connection, in each direction."""
    is_cut: bool = False
    """Nothing arrives any more, and nothing says so: a partition."""

    @contextmanager
    def opened(self) -> Iterator[int]:
        """The port at which the server is reached through it."""
        loop = asyncio.new_event_loop()
        server = loop.run_until_complete(asyncio.start_server(self._accept, "127.0.0.1", 0))
        thread = threading.Thread(target=loop.run_forever)
        thread.start()
        try:
            yield server.sockets[0].getsockname()[1]
        finally:
            asyncio.run_coroutine_threadsafe(_ended(server), loop).result()
            loop.call_soon_threadsafe(loop.stop)
            thread.join()
            loop.close()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        async with _closed(writer):
            with suppress(OSError, asyncio.CancelledError):
                back, forth = await asyncio.open_connection("127.0.0.1", self.port)
                async with _closed(forth):
                    await asyncio.gather(self._pass_on(reader, forth), self._pass_on(back, writer))

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        on_its_way: asyncio.Queue[_Piece] = asyncio.Queue(256)
        async with asyncio.TaskGroup() as both:
            both.create_task(self._arrive(on_its_way, writer))
            clock, sent, data = asyncio.get_running_loop().time, 0.0, b"first"
            while data:
                data = await _read(reader)
                sent = max(sent, clock()) + len(data) / (self.bytes_per_second or float("inf"))
                await on_its_way.put((sent + self.delay, data))

    async def _arrive(self, pieces: asyncio.Queue[_Piece], writer: asyncio.StreamWriter) -> None:
        clock = asyncio.get_running_loop().time
        while True:
            due, data = await pieces.get()
            await asyncio.sleep(due - clock())
            while self.is_cut:
                await asyncio.sleep(0.01)
            with suppress(OSError, RuntimeError):  # closed by then
                if not data:
                    writer.write_eof()
                    return
                writer.write(data)
                await writer.drain()


async def _read(reader: asyncio.StreamReader) -> bytes:
    """What comes; nothing at the end."""
    try:
        return await reader.read(_READ)
    except OSError:
        return b""


@asynccontextmanager
async def _closed(writer: asyncio.StreamWriter) -> AsyncIterator[None]:
    try:
        yield
    finally:
        writer.close()
        with suppress(OSError):
            await writer.wait_closed()


async def _ended(server: asyncio.Server) -> None:
    server.close()
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
