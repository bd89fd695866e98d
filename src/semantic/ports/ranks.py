"""The processes (ranks) that compute one model together, and their messages."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from enum import IntEnum, auto
from queue import SimpleQueue
from typing import NamedTuple, Protocol, TypeAlias


class Op(IntEnum):
    """Kinds of frames. A kind without a comment is a call of `BatchBackend`."""

    BEAT = auto()  # either way: the sender is alive
    END = auto()  # from rank 0: the work has ended
    LOST = auto()  # either way: the sender ends, so the receiver must too; the bytes are the reason
    MEMORY = auto()  # to rank 0, like a beat: bytes of memory that the sender may still use
    FAILED = auto()  # to rank 0: a call raised; the bytes are its message
    BODY = auto()  # from rank 0: bytes of a body to load; to rank 0: bytes of an exported body
    NO_BODY = auto()  # to rank 0: an export failed; the bytes are a message
    TAKEN = auto()  # to rank 0: the sender has read a body from shared memory
    PIECE = auto()  # from rank 0: number and size of shared memory; a descriptor follows
    DROP = auto()  # from rank 0: numbers of pieces that it no longer uses
    ROOM = auto()  # from rank 0: where to put a call's body: piece, offset, bytes; empty: send it
    FREE = auto()  # from rank 0: keys of blocks that are no longer referenced
    OPEN = auto()
    RESTORE = auto()
    RESERVE = auto()
    SET_ASIDE = auto()
    RETURN_MEMORY = auto()
    GIVE_BACK = auto()  # not in the port: return the memory that MLX keeps
    PREFILL = auto()
    PREFILL_TOGETHER = auto()
    SCORE = auto()
    START = auto()
    DECODE = auto()
    EXTRACT = auto()
    CLOSE = auto()
    PAUSE = auto()
    EXPORT = auto()
    CHECKPOINT = auto()
    LOADING = auto()
    LOADED = auto()


Data = bytes | bytearray | memoryview


class Frame(NamedTuple):
    """One message between two ranks. `number` identifies the call that it belongs to."""

    op: Op
    number: int
    ints: Sequence[int] = ()
    data: Data = b""

    @property
    def text(self) -> str:
        """The bytes of the frame as text."""
        return bytes(self.data).decode()


class Pins(Protocol):
    """Pins host memory, so that a device can access it."""

    def pin(self, address: int, n_bytes: int) -> None: ...

    def unpin(self, address: int) -> None: ...


class MappedPort(Protocol):
    """Memory of rank 0 that this process maps, in numbered pieces. One thread adds and drops the
    pieces. Other threads use them."""

    driver: Pins | None
    """Pins the mapped memory that the device needs to access."""

    def add(self, number: int, descriptor: int, n_bytes: int) -> None:
        """Map a piece of memory and close its `descriptor`. If this fails, `view` raises the
        error."""

    def drop(self, numbers: Sequence[int]) -> None:
        """Unmap pieces of memory that are not in use."""

    def view(self, number: int, at: int, n_bytes: int) -> memoryview:
        """Return `n_bytes` of a piece. Raises RuntimeError if mapping the piece failed."""

    def offer(self, call: int, where: Sequence[int]) -> None:
        """Record the place in shared memory for the block body of `call`. If `where` is empty, a
        frame carries the body."""

    def room(self, call: int, n_bytes: int) -> memoryview | None:
        """Wait for the memory for the block body of `call`, and return the memory. Returns None if
        a frame carries the body. Raises RuntimeError."""

    def leave(self, call: int) -> None:
        """Forget the place for the block body of `call`."""


class ChannelPort(Protocol):
    """A connection to the rank `peer`. Any thread may send."""

    peer: int
    is_local: bool
    mapped: MappedPort

    def send(self, frame: Frame, descriptor: int | None = None) -> None:
        """Send a frame, then the file `descriptor`. Raises nothing if the peer is lost."""


class LinksPort(Protocol):
    """The connections of one rank. All ranks end if one is lost."""

    channels: Sequence[ChannelPort]
    """On rank 0, the channels to all other ranks. On any other rank, the channel to rank 0."""
    received: SimpleQueue[tuple[int, Frame]]
    """The received frames. Each frame comes with its sender."""
    before_end: list[Callable[[], object]]
    """Called after the loss of a rank, before the process ends. The call may take a few seconds."""
    left: Callable[[], int] | None
    """Returns the number of bytes of memory that this rank may still use."""

    def computing(self, what: str) -> AbstractContextManager[None]:
        """Limit the time of the call in the `with` block. `what` names the call."""

    def finish(self) -> None:
        """Announce the regular end of the work. The end of a peer is then not a failure."""

    def end(self, reason: str) -> None:
        """End this process and all other ranks, for `reason`."""


class CollectivePort(Protocol):
    """Operations that all ranks call in the same order."""

    rank: int
    size: int

    def gather(self, data: bytes) -> list[bytes]:
        """Return the `data` of every rank, in order. `data` has the same size on all ranks."""


class PlacementPort(Protocol):
    """The place of this process among the `size` processes that compute a model. `here` of these
    processes run on this machine."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    @property
    def here(self) -> int: ...

    @property
    def transport(self) -> str:
        """The name of the framework's backend for communication between ranks."""

    def meeting(self) -> AbstractContextManager[None]:
        """Limit the time until all ranks are connected. After that time the process ends."""

    def connect(self, ranks: CollectivePort, mapped: Callable[[], MappedPort]) -> LinksPort:
        """Connect this rank with the other ranks. Calls `mapped` for each channel. Raises
        BackendError for an unreachable rank."""


Places: TypeAlias = Callable[[Mapping[str, str], Callable[[], bytes | None]], PlacementPort | None]
"""Called with the environment and a function that reads the ranks' secret. Raises
InvalidRequestError for an environment that `mlx.launch` did not make, and for a missing secret."""
