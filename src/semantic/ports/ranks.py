"""The processes that compute one model: the frames between them, and the place of each. Knows
neither sockets nor computations."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from enum import IntEnum, auto
from queue import SimpleQueue
from typing import NamedTuple, Protocol, TypeAlias


class Op(IntEnum):
    """Kinds of frames. Members without a comment are calls of `BatchBackend`, from rank 0."""

    BEAT = auto()  # either way: the sender lives
    END = auto()  # from rank 0: the work has ended
    LOST = auto()  # either way: the sender ends, and so must the receiver; the bytes are a reason
    MEMORY = auto()  # to rank 0, as a beat: bytes that the sender may still take
    FAILED = auto()  # to rank 0: a call raised; the bytes are its message
    BODY = auto()  # from rank 0: bytes of a body to load; to rank 0: of an exported one
    NO_BODY = auto()  # to rank 0: an export failed; the bytes are a message
    TAKEN = auto()  # to rank 0: the sender has read a body from shared memory
    PIECE = auto()  # from rank 0: shared memory by its number, and its size; a descriptor follows
    DROP = auto()  # from rank 0: numbers of pieces that it gave up
    ROOM = auto()  # from rank 0: place for a call's body: piece, offset, bytes; or none, to send it
    FREE = auto()  # from rank 0: keys of blocks that nothing refers to any more
    OPEN = auto()
    RESTORE = auto()
    RESERVE = auto()
    SET_ASIDE = auto()
    RETURN_MEMORY = auto()
    GIVE_BACK = auto()  # not of the port: return the memory that MLX keeps
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
    """One frame. `number` is that of the call that it is or belongs to."""

    op: Op
    number: int
    ints: Sequence[int] = ()
    data: Data = b""

    @property
    def text(self) -> str:
        """The bytes of a message."""
        return bytes(self.data).decode()


class Pins(Protocol):
    """Makes host memory reachable for a device."""

    def pin(self, address: int, n_bytes: int) -> None: ...

    def unpin(self, address: int) -> None: ...


class MappedPort(Protocol):
    """Rank 0's memory, mapped by this rank. One thread adds and drops pieces; others use them."""

    driver: Pins | None
    """Pins what the device is to reach."""

    def add(self, number: int, descriptor: int, n_bytes: int) -> None:
        """Map a piece and close its `descriptor`. A failure shows in `view`."""

    def drop(self, numbers: Sequence[int]) -> None:
        """Unmap pieces that nothing uses any more."""

    def view(self, number: int, at: int, n_bytes: int) -> memoryview:
        """Return part of a piece; the first use pins the piece. Raises RuntimeError."""

    def offer(self, call: int, where: Sequence[int]) -> None:
        """Record the place for the body of a call; an empty `where` means a frame."""

    def room(self, call: int, n_bytes: int) -> memoryview | None:
        """Wait for rank 0's place for a body of `n_bytes`; None: a frame. Raises RuntimeError."""

    def leave(self, call: int) -> None:
        """Forget the offer for a call."""


class ChannelPort(Protocol):
    """Frames to and from one other rank, the `peer`. Any thread may send."""

    peer: int
    is_local: bool
    mapped: MappedPort

    def send(self, frame: Frame, descriptor: int | None = None) -> None:
        """Send a frame, then a `descriptor`. Other code ends the process for a lost peer."""


class LinksPort(Protocol):
    """The connections of one rank, and the end of all after the loss of one."""

    channels: Sequence[ChannelPort]
    """To all others of rank 0, and of others that to rank 0."""
    received: SimpleQueue[tuple[int, Frame]]
    """Each frame that came, and from which rank."""
    before_end: list[Callable[[], object]]
    """Calls, a few seconds at most, before the process ends after the loss of a rank."""
    left: Callable[[], int] | None
    """Bytes that this rank may still take; the others than 0 send it with each beat."""

    def computing(self, what: str) -> AbstractContextManager[None]:
        """The time limit of a call, which may wait for other ranks."""

    def finish(self) -> None:
        """End the work in good order: no later act of the others counts as a failure."""

    def end(self, reason: str) -> None:
        """End this process because the ranks cannot go on; the others then end too."""


class CollectivePort(Protocol):
    """Operations that all ranks call in the same order."""

    rank: int
    size: int

    def gather(self, data: bytes) -> list[bytes]:
        """Return the `data` of all ranks, of equal length, by rank; reads no text or objects."""


class PlacementPort(Protocol):
    """One process of those that compute a model: `rank` of `size`, `here` of them on this
    machine."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    @property
    def here(self) -> int: ...

    @property
    def transport(self) -> str:
        """The framework's backend between the ranks."""

    def meeting(self) -> AbstractContextManager[None]:
        """The time limit for all ranks to meet; the process ends after it."""

    def connect(self, ranks: CollectivePort, mapped: Callable[[], MappedPort]) -> LinksPort:
        """Connect this rank with the others, each channel with a `mapped` of its own. Raises
        BackendError if one is out of reach."""


Places: TypeAlias = Callable[[Mapping[str, str], Callable[[], bytes | None]], PlacementPort | None]
"""Takes the environment of a process and what reads the secret that its ranks know. Raises
InvalidRequestError for an environment that `mlx.launch` does not make, and without a secret where
others can reach the ranks."""
