"""The ranks of one model: how they find each other, and how all end when one is lost.

`mlx.launch` starts them and says where rank 0 is. Collective operations of MLX cannot be cancelled,
so a process whose peer is lost ends itself, as after a crash: what is stored stays. Knows
processes and connections; not what they compute.
"""

from __future__ import annotations

import atexit
import faulthandler
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
from typing import cast

import mlx.core as mx

from semantic.adapters.mlx.ranks.channel import (
    Channel,
    Frame,
    Keys,
    Op,
    PeerLostError,
    admit,
    is_of_this_user,
    join,
)
from semantic.domain.errors import BackendError

logger = logging.getLogger("semantic.server")

_TOKEN_BYTES = 32
_PATH_BYTES = 108
"""The longest path of a Unix socket on any system."""
_JOIN_SECONDS = 60.0
"""For all ranks to meet, and then to connect."""
_STDERR = 2
_GREETING_SECONDS = 5.0
SILENCE_SECONDS = 20.0
"""After which a rank that sends nothing is lost."""
_BEAT_SECONDS = 1.0
"""Between two signs of life, which have the memory that is left."""
_STALL_SECONDS = 600.0
"""For one call. A chunk of a prompt takes seconds; one that takes this long will not end."""
_END_SECONDS = 10.0
"""For what is to be done before the process ends."""
_LOST = 1
"""The exit code: a supervisor starts all ranks again."""


class Ranks:
    """The processes that compute one model, seen from one of them.

    `channels` are the connections to all others of rank 0, and of others that to rank 0.
    """

    def __init__(
        self,
        transport: str,
        host: str,
        secret: bytes = b"",
        *,
        silence: float = SILENCE_SECONDS,
        stall: float = _STALL_SECONDS,
    ) -> None:
        """Meet the others over MLX's backend `transport`; rank 0 listens on its address `host`.

        What they send each other is sealed with `secret`, which all have, and with a token of this
        start, which they get over `transport`: without a secret as safe as that is. On one machine
        it goes over a Unix socket in a private folder instead.
        Raises BackendError if they cannot be reached.
        """
        self.transport = transport
        logger.info("waiting at most %.0f s for all ranks, over %s", _JOIN_SECONDS, transport)
        # MLX may wait for ever, with the interpreter's lock: no thread of ours could end that.
        faulthandler.dump_traceback_later(_JOIN_SECONDS, exit=True, file=_STDERR)
        try:
            self.group = mx.distributed.init(strict=True, backend=transport)
        except (RuntimeError, ValueError) as error:
            raise BackendError(f"the ranks cannot meet over {transport}: {error}") from error
        finally:
            faulthandler.cancel_dump_traceback_later()
        self.rank, self.size = self.group.rank(), self.group.size()
        self.before_end: list[Callable[[], object]] = []
        """Called, for a few seconds at most, before the process ends because a rank was lost."""
        self.left: Callable[[], int] | None = None
        """Bytes that this rank may still take; the others than 0 send it with each beat."""
        self.received: SimpleQueue[tuple[int, Frame]] = SimpleQueue()
        """Each frame that came, and from which rank."""
        self._stall = stall
        self._computing: tuple[str, float] | None = None
        self._ends = threading.Lock()
        self._is_over = False
        try:
            self.channels = self._connect(host, secret, silence)
        except OSError as error:
            raise BackendError(f"the ranks cannot connect to rank 0 on {host}: {error}") from error
        self._start(lambda: self._watch(min(_BEAT_SECONDS, silence / 4)))
        for channel in self.channels:
            self._start(partial(self._listen, channel))
        if self.rank == 0:
            atexit.register(self.finish)

    # Collective: all ranks call these in the same order

    def gather(self, data: bytes) -> list[bytes]:
        """The `data` of all ranks by rank, of equal length each. No text and no object is read."""
        mine = mx.zeros((self.size, len(data)), mx.int32)
        mine[self.rank] = mx.array(list(data), mx.int32)
        found = mx.distributed.all_sum(mine, group=self.group)
        return [bytes(row) for row in cast(list[list[int]], found.tolist())]

    def all_found(self, found: bool) -> bool:
        """Whether every rank found so."""
        n = mx.distributed.all_sum(mx.array(int(found)), group=self.group)
        return n.item() == self.size

    def from_first(self, tokens: mx.array) -> mx.array:
        """The sampled `tokens` of rank 0, on every rank, as a part of the graph.

        Depends on the tokens of this rank, so that it comes after all of the model's operations.
        """
        mine = mx.array(int(self.rank == 0), tokens.dtype)
        return mx.distributed.all_sum(tokens * mine, group=self.group)

    # One rank alone

    @contextmanager
    def computing(self, what: str) -> Iterator[None]:
        """The time limit of a call, which may wait for other ranks."""
        self._computing = what, time.monotonic()
        try:
            yield
        finally:
            self._computing = None

    def finish(self) -> None:
        """End the work in good order: what the others do from now on is no failure."""
        self._is_over = True
        for channel in self.channels:
            channel.send(Frame(Op.END, 0))

    def end(self, reason: str) -> None:
        """End this process because the ranks cannot go on; the others then end too."""
        with self._ends:  # never released: one reason is enough
            if self._is_over:
                return
            logger.critical("rank %d of %d ends: %s", self.rank, self.size, reason)
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

    # Inside

    def _connect(self, host: str, secret: bytes, silence: float) -> list[Channel]:
        """One connection to rank 0 for each other rank."""
        if self.rank == 0:
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            with (
                tempfile.TemporaryDirectory() as folder,
                socket.create_server((host, 0), family=family, backlog=self.size) as server,
                socket.socket(socket.AF_UNIX) as local,
            ):
                servers, path = [server], bytes(Path(folder) / "ranks")
                with suppress(OSError):  # the path is too long: they go on over TCP
                    local.bind(path)
                    local.listen(self.size)
                    servers.append(local)
                token = secrets.token_bytes(_TOKEN_BYTES)
                port = server.getsockname()[1].to_bytes(2, "little")
                self.gather(port + token + path[:_PATH_BYTES].ljust(_PATH_BYTES, b"\0"))
                return self._accept(servers, _joined(secret, token), silence)
        offered = self.gather(bytes(2 + _TOKEN_BYTES + _PATH_BYTES))[0]
        port, token, path = offered[:2], offered[2:-_PATH_BYTES], offered[-_PATH_BYTES:]
        sock = _to_this_machine(path.rstrip(b"\0")) or socket.create_connection(
            (host, int.from_bytes(port, "little")), timeout=_JOIN_SECONDS
        )
        keys = join(sock, _joined(secret, token), self.rank)
        if keys is None:
            raise BackendError(
                "rank 0 has another secret: expected one --fleet-secret-file for all"
            )
        return [_channel(sock, 0, silence, keys)]

    def _accept(
        self, servers: Sequence[socket.socket], secret: bytes, silence: float
    ) -> list[Channel]:
        found: dict[int, Channel] = {}
        deadline = time.monotonic() + _JOIN_SECONDS
        while len(found) < self.size - 1:
            ready = select.select(servers, (), (), max(0.0, deadline - time.monotonic()))[0]
            if not ready:
                raise TimeoutError("not all ranks came")
            sock, _ = ready[0].accept()
            sock.settimeout(_GREETING_SECONDS)
            known = sock.family != socket.AF_UNIX or is_of_this_user(sock)
            admitted = admit(sock, secret) if known else None
            if admitted is None or admitted[0] in found or not 0 < admitted[0] < self.size:
                logger.warning("a connection that does not know the ranks' secret was refused")
                sock.close()
                continue
            rank, keys = admitted
            found[rank] = _channel(sock, rank, silence, keys)
        return [found[rank] for rank in range(1, self.size)]

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
        """Tell the others that this rank lives, and notice when it is stuck."""
        while not self._is_over:
            beat = self._beat()
            for channel in self.channels:
                channel.send(beat)
            begun = self._computing
            if begun is not None and time.monotonic() - begun[1] > self._stall:
                self.end(f"{begun[0]} has not ended for {self._stall:.0f} seconds")
            time.sleep(interval)

    def _beat(self) -> Frame:
        if self.left is not None:
            with suppress(OSError):  # the system does not say it
                return Frame(Op.MEMORY, 0, (self.left(),))
        return Frame(Op.BEAT, 0)


def _to_this_machine(path: bytes) -> socket.socket | None:
    """Connect to a process of this user at `path`; None if there is none on this machine."""
    sock = socket.socket(socket.AF_UNIX)
    sock.settimeout(_JOIN_SECONDS)
    with suppress(OSError):
        sock.connect(path)
        if is_of_this_user(sock):
            return sock
    sock.close()
    return None


def _channel(sock: socket.socket, peer: int, silence: float, keys: Keys) -> Channel:
    """A channel over `sock`, sealed unless that is a Unix socket."""
    return Channel(sock, peer, silence, None if sock.family == socket.AF_UNIX else keys)


def _joined(secret: bytes, token: bytes) -> bytes:
    return hmac.digest(secret, token, "sha256")


def require_same(found: Sequence[bytes], what: str) -> None:
    """Raise BackendError, the same on every rank, unless all ranks have the same `what`."""
    for rank, one in enumerate(found):
        if one != found[0]:
            raise BackendError(f"rank {rank} has another {what} than rank 0")
