"""The connections of one rank. If one connection fails, all ranks end."""

from __future__ import annotations

import atexit
import hmac
import logging
import os
import secrets
import select
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from queue import SimpleQueue

from semantic.domain.errors import BackendError
from semantic.ports.ranks import ChannelPort, CollectivePort, Frame, MappedPort, Op
from semantic_fleet.ranks.channel import Channel, Keys, PeerLostError, admit, is_of_this_user, join

logger = logging.getLogger("semantic.server")

_TOKEN_BYTES = 32
_PATH_BYTES = 108
"""The number of bytes of the longest path that every system allows for a Unix socket."""
JOIN_SECONDS = 60.0
"""Seconds in which all ranks must meet, and again in which they must connect."""
_STDERR = 2
_GREETING_SECONDS = 5.0
SILENCE_SECONDS = 20.0
"""Seconds without a frame after which a rank counts as lost."""
_BEAT_SECONDS = 1.0
"""Seconds between two heartbeats, which report the free memory."""
_STALL_SECONDS = 600.0
"""Seconds after which a call counts as stuck."""
_END_SECONDS = 10.0
"""Seconds to wait for running calls before the process ends."""
_LOST = 1
"""The exit code after the loss of a rank: a supervisor then restarts all ranks."""


class Links:
    """Implements `LinksPort`."""

    def __init__(
        self,
        ranks: CollectivePort,
        host: str,
        secret: bytes,
        mapped: Callable[[], MappedPort],
        *,
        silence: float = SILENCE_SECONDS,
        stall: float = _STALL_SECONDS,
    ) -> None:
        """Connect with the other ranks. Rank 0 listens on its address `host`.

        All ranks have the same `secret`. Without it, frames are only as safe as `ranks`. Raises
        BackendError if the ranks cannot connect.
        """
        self.before_end: list[Callable[[], object]] = []
        self.left: Callable[[], int] | None = None
        self.received: SimpleQueue[tuple[int, Frame]] = SimpleQueue()
        self._ranks = ranks
        self._mapped = mapped
        self._stall = stall
        self._computing: tuple[str, float] | None = None
        self._ends = threading.Lock()
        self._is_over = False
        try:
            channels = self._connect(host, secret, silence)
        except OSError as error:
            raise BackendError(f"the ranks cannot connect to rank 0 on {host}: {error}") from error
        self.channels: Sequence[ChannelPort] = channels
        self._start(lambda: self._watch(min(_BEAT_SECONDS, silence / 4)))
        for channel in channels:
            self._start(partial(self._listen, channel))
        if ranks.rank == 0:
            atexit.register(self.finish)

    @contextmanager
    def computing(self, what: str) -> Iterator[None]:
        """Limit the time of the calls in the `with` block."""
        self._computing = what, time.monotonic()
        try:
            yield
        finally:
            self._computing = None

    def finish(self) -> None:
        """Announce the regular end of the work. The end of another rank is then not a failure."""
        self._is_over = True
        for channel in self.channels:
            channel.send(Frame(Op.END, 0))

    def end(self, reason: str) -> None:
        """End this process and all other ranks, for `reason`."""
        with self._ends:  # never released: one reason is enough
            if self._is_over:
                return
            logger.critical("rank %d of %d ends: %s", self._ranks.rank, self._ranks.size, reason)
            lost = Frame(Op.LOST, 0, data=reason.encode())
            calls = [
                threading.Thread(target=channel.send, args=(lost,), daemon=True)
                for channel in self.channels
            ]
            calls += [threading.Thread(target=call, daemon=True) for call in self.before_end]
            for one in calls:
                one.start()
            deadline = time.monotonic() + _END_SECONDS
            for one in calls:
                one.join(max(0.0, deadline - time.monotonic()))
            os._exit(_LOST)

    def _connect(self, host: str, secret: bytes, silence: float) -> list[Channel]:
        if self._ranks.rank == 0:
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            with (
                tempfile.TemporaryDirectory() as folder,
                socket.create_server((host, 0), family=family, backlog=self._ranks.size) as server,
                socket.socket(socket.AF_UNIX) as local,
            ):
                servers, path = [server], bytes(Path(folder) / "ranks")
                with suppress(OSError):  # the path is too long: use TCP
                    local.bind(path)
                    local.listen(self._ranks.size)
                    servers.append(local)
                token = secrets.token_bytes(_TOKEN_BYTES)
                port = server.getsockname()[1].to_bytes(2, "little")
                self._ranks.gather(port + token + path[:_PATH_BYTES].ljust(_PATH_BYTES, b"\0"))
                return self._accept(servers, _joined(secret, token), silence)
        offered = self._ranks.gather(bytes(2 + _TOKEN_BYTES + _PATH_BYTES))[0]
        port, token, path = offered[:2], offered[2:-_PATH_BYTES], offered[-_PATH_BYTES:]
        sock = _to_this_machine(path.rstrip(b"\0")) or socket.create_connection(
            (host, int.from_bytes(port, "little")), timeout=JOIN_SECONDS
        )
        keys = join(sock, _joined(secret, token), self._ranks.rank)
        if keys is None:
            raise BackendError(
                "rank 0 has another secret: start all ranks with the same --fleet-secret-file"
            )
        return [self._channel(sock, 0, silence, keys)]

    def _accept(
        self, servers: Sequence[socket.socket], secret: bytes, silence: float
    ) -> list[Channel]:
        found: dict[int, Channel] = {}
        deadline = time.monotonic() + JOIN_SECONDS
        while len(found) < self._ranks.size - 1:
            ready = select.select(servers, (), (), max(0.0, deadline - time.monotonic()))[0]
            if not ready:
                raise TimeoutError("some ranks did not connect")
            sock, _ = ready[0].accept()
            sock.settimeout(_GREETING_SECONDS)
            known = sock.family != socket.AF_UNIX or is_of_this_user(sock)
            admitted = admit(sock, secret) if known else None
            if admitted is None or admitted[0] in found or not 0 < admitted[0] < self._ranks.size:
                logger.warning("refused a connection from a process without the ranks' secret")
                sock.close()
                continue
            rank, keys = admitted
            found[rank] = self._channel(sock, rank, silence, keys)
        return [found[rank] for rank in range(1, self._ranks.size)]

    def _channel(self, sock: socket.socket, peer: int, silence: float, keys: Keys) -> Channel:
        sealed = None if sock.family == socket.AF_UNIX else keys
        return Channel(sock, peer, silence, self._mapped(), sealed)

    def _start(self, work: Callable[[], None]) -> None:
        threading.Thread(target=work, name="ranks", daemon=True).start()

    def _listen(self, channel: Channel) -> None:
        try:
            for frame in channel.frames():
                if frame.op is Op.LOST:
                    self.end(f"rank {channel.peer} ends: {frame.text}")
                self._is_over = self._is_over or frame.op is Op.END
                self.received.put((channel.peer, frame))
        except PeerLostError as error:
            self.end(str(error))

    def _watch(self, interval: float) -> None:
        while not self._is_over:
            beat = self._beat()
            for channel in self.channels:
                channel.send(beat)
            begun = self._computing
            if begun is not None and time.monotonic() - begun[1] > self._stall:
                self.end(f"{begun[0]} did not end within {self._stall:.0f} seconds")
            time.sleep(interval)

    def _beat(self) -> Frame:
        if self.left is not None:
            with suppress(OSError):  # the system does not report its free memory
                return Frame(Op.MEMORY, 0, (self.left(),))
        return Frame(Op.BEAT, 0)


def _to_this_machine(path: bytes) -> socket.socket | None:
    sock = socket.socket(socket.AF_UNIX)
    sock.settimeout(JOIN_SECONDS)
    with suppress(OSError):
        sock.connect(path)
        if is_of_this_user(sock):
            return sock
    sock.close()
    return None


def _joined(secret: bytes, token: bytes) -> bytes:
    return hmac.digest(secret, token, "sha256")
