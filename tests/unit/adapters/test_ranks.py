"""Ranks without a model: what `mlx.launch` says, frames over a connection, what is refused."""

from __future__ import annotations

import itertools
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING

import pytest

from semantic.domain.errors import InvalidRequestError
from semantic_fleet.ranks.launched import Grid, read_grid, with_secret

if TYPE_CHECKING:
    from semantic.ports.ranks import Data, MappedPort
    from semantic_fleet.ranks.channel import Channel, Keys

pytestmark = pytest.mark.mlx  # below `adapters.mlx` nothing is imported without it

TWO = [["10.0.0.1:32323"], ["10.0.0.2:32324"]]
HERE = [["127.0.0.1:5000", "127.0.0.1:5001"], ["127.0.0.1:5002", "127.0.0.1:5003"]]


def ring(folder: Path, hosts: object, rank: str = "0") -> dict[str, str]:
    path = folder / "hosts"
    path.write_text(json.dumps(hosts) if hosts else "")
    return {"MLX_RANK": rank, "MLX_HOSTFILE": str(path)}


def test_a_process_that_was_started_alone_has_no_ranks(tmp_path: Path) -> None:
    assert read_grid({}) is None
    assert read_grid(ring(tmp_path, [])) is None


def test_ranks_of_a_ring_are_those_of_its_file(tmp_path: Path) -> None:
    assert read_grid(ring(tmp_path, TWO, "1")) == Grid(1, 2, 1, "ring", "10.0.0.1")
    assert read_grid(ring(tmp_path, HERE)) == Grid(0, 2, 2, "ring", "127.0.0.1")
    assert read_grid(ring(tmp_path, [["[fe80::1]:1"], ["[fe80::2]:1"]])) == Grid(
        0, 2, 1, "ring", "fe80::1"
    )


def test_ranks_of_nccl_and_jaccl_are_in_the_environment(tmp_path: Path) -> None:
    given = {"MLX_RANK": "1", "NCCL_HOST_IP": "10.0.0.1", "MLX_WORLD_SIZE": "2"}
    assert read_grid(given) == Grid(1, 2, 1, "nccl", "10.0.0.1")
    devices = tmp_path / "devices"
    devices.write_text(json.dumps([[None, "rdma"], ["rdma", None]]))
    given = {
        "MLX_RANK": "0",
        "MLX_JACCL_COORDINATOR": "10.0.0.1:32323",
        "MLX_IBV_DEVICES": str(devices),
    }
    assert read_grid(given) == Grid(0, 2, 1, "jaccl", "10.0.0.1")


@pytest.mark.parametrize(
    "given",
    [
        {"MLX_RANK": "0"},
        {"MLX_RANK": "x", "NCCL_HOST_IP": "h", "MLX_WORLD_SIZE": "2"},
        {"MLX_RANK": "0", "NCCL_HOST_IP": "h"},
        {"MLX_RANK": "0", "MLX_HOSTFILE": "no such file"},
    ],
)
def test_an_environment_that_mlx_launch_does_not_make_is_refused(given: dict[str, str]) -> None:
    with pytest.raises(InvalidRequestError, match=r"expected a start by `mlx\.launch`"):
        read_grid(given)


def test_a_rank_that_the_file_does_not_name_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequestError, match=r"mlx\.launch"):
        read_grid(ring(tmp_path, TWO, "2"))


def mapped() -> MappedPort:
    from semantic.adapters.mlx.ranks.shared_memory import MappedMemory

    return MappedMemory()


def keys() -> tuple[Keys, Keys]:
    """Of both ends of a connection."""
    from semantic_fleet.ranks.channel import Keys

    one, other = b"one".ljust(32), b"other".ljust(32)
    return Keys(one, other), Keys(other, one)


@contextmanager
def connected() -> Iterator[tuple[socket.socket, socket.socket]]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        here = socket.create_connection(server.getsockname())
        there, _ = server.accept()
    yield here, there
    here.close()
    there.close()


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    with connected() as both:
        yield both


@pytest.mark.process
def test_frames_arrive_as_they_were_sent_and_beats_are_left_out(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    from semantic.ports.ranks import Frame, Op
    from semantic_fleet.ranks.channel import Channel

    here, there = (
        Channel(one, peer, 5.0, mapped(), known)
        for one, peer, known in zip(pair, (1, 0), keys(), strict=True)
    )
    here.send(Frame(Op.BEAT, 0))
    here.send(Frame(Op.PREFILL, 7, (3, -1, 1 << 40)))
    here.send(Frame(Op.BODY, 8, (), b"\x00\xff" * 9))
    frames = there.frames()
    first, second = next(frames), next(frames)
    assert (first.op, first.number, list(first.ints)) == (Op.PREFILL, 7, [3, -1, 1 << 40])
    assert (second.op, second.number, bytes(second.data)) == (Op.BODY, 8, b"\x00\xff" * 9)


@pytest.mark.process
def test_a_peer_that_ends_is_silent_or_sends_no_frame_is_lost(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    from semantic.ports.ranks import Frame, Op
    from semantic_fleet.ranks.channel import Channel, PeerLostError

    here, there = pair
    quiet = Channel(there, 1, 0.01, mapped(), keys()[1])
    with pytest.raises(PeerLostError, match="rank 1 was silent"):
        next(quiet.frames())
    here.sendall(b"\xff" * 64)
    with pytest.raises(PeerLostError, match="seal of a frame from rank 1"):
        next(quiet.frames())
    here.close()
    with pytest.raises(PeerLostError, match="rank 1 ended"):
        next(quiet.frames())
    quiet.send(Frame(Op.BEAT, 0))  # what is lost is found by reading alone
    quiet.close()
    quiet.send(Frame(Op.BEAT, 0))


def change(sent: bytes) -> bytes:
    return sent[:70] + bytes([sent[70] ^ 1]) + sent[71:]


@pytest.mark.process
@pytest.mark.parametrize(
    "damage",
    [change, lambda sent: sent[len(sent) // 2 :], lambda sent: sent[: len(sent) // 2] * 2],
    ids=["changed", "left out", "repeated"],
)
def test_a_frame_that_is_changed_left_out_or_repeated_loses_the_peer(
    pair: tuple[socket.socket, socket.socket], damage: Callable[[bytes], bytes]
) -> None:
    from semantic.ports.ranks import Frame, Op
    from semantic_fleet.ranks.channel import Channel, PeerLostError

    here, there = pair
    with connected() as (sent, received):
        source = Channel(here, 0, 5.0, mapped(), keys()[0])
        for number in range(2):
            source.send(Frame(Op.PREFILL, number, (5, 6), b"body"))
        here.shutdown(socket.SHUT_WR)
        said = there.makefile("rb").read()
        sent.sendall(damage(said))
        frames = Channel(received, 1, 5.0, mapped(), keys()[1]).frames()
        with pytest.raises(PeerLostError, match="seal of a frame from rank 1"):
            list(itertools.islice(frames, 2))


@pytest.mark.process
@pytest.mark.parametrize("alike", [True, False])
def test_ranks_know_each_other_by_a_secret_that_neither_sends(
    pair: tuple[socket.socket, socket.socket], alike: bool
) -> None:
    from semantic_fleet.ranks.channel import admit, join

    here, there = pair
    with ThreadPoolExecutor(1) as other:
        joining = other.submit(join, here, b"secret", 3)
        found = admit(there, b"secret" if alike else b"another")
        there.shutdown(socket.SHUT_WR)
        mine = joining.result()
    if not alike:
        assert found is None
        assert mine is None
        return
    assert found is not None
    assert mine is not None
    rank, theirs = found
    assert rank == 3
    assert (mine.own, mine.peer) == (theirs.peer, theirs.own)
    assert mine.own != mine.peer


def test_a_stranger_that_drips_bytes_is_refused_when_the_time_is_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from semantic_fleet.ranks import channel

    class Dripping:
        now, timeout, n_read = 0.0, 5.0, 0

        def gettimeout(self) -> float:
            return 5.0

        def settimeout(self, seconds: float) -> None:
            self.timeout = seconds

        def sendall(self, data: bytes) -> None:
            """It goes nowhere."""

        def recv(self, _: int) -> bytes:
            if self.timeout < 0.9:
                raise TimeoutError
            self.now += 0.9
            self.n_read += 1
            return b"x"

    stranger = Dripping()
    monkeypatch.setattr(time, "monotonic", lambda: stranger.now)
    assert channel.admit(stranger, b"secret") is None  # type: ignore[arg-type]  # all it calls
    assert stranger.n_read <= 2 * 5 / 0.9


class Follower:
    """The other end of a Unix socket, whose frames are read on a thread."""

    def __init__(self, sock: socket.socket) -> None:
        from semantic.ports.ranks import Frame
        from semantic_fleet.ranks.channel import Channel

        self.channel = Channel(sock, 0, 60.0, mapped())
        self.frames: SimpleQueue[Frame] = SimpleQueue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        from semantic_fleet.ranks.channel import PeerLostError

        with suppress(PeerLostError):
            for frame in self.channel.frames():
                self.frames.put(frame)


@contextmanager
def one_machine() -> Iterator[tuple[Channel, Follower]]:
    from semantic_fleet.ranks.channel import Channel

    here, there = socket.socketpair(socket.AF_UNIX)
    with here, there:
        yield Channel(here, 1, 60.0, mapped()), Follower(there)


needs_shared_memory = pytest.mark.skipif(
    not hasattr(os, "memfd_create"), reason="this system has no memory without a name"
)
PART = 1 << 16


@pytest.mark.process
@needs_shared_memory
def test_ranks_of_one_machine_copy_bodies_through_memory_that_both_have() -> None:
    from semantic.adapters.mlx.ranks.shared_memory import Loan, SharedMemory, SharedRoom
    from semantic.adapters.mlx.transfers import HostMemory, Transfers
    from semantic.ports.ranks import Frame, Op
    from tests.support.host_driver import HostDriver

    mine, theirs = HostDriver(), HostDriver()
    with one_machine() as (channel, other):
        memory = SharedMemory([channel], Transfers(mine))
        memory._memory = HostMemory(memory, most_free_bytes=0)
        other.channel.mapped.driver = theirs
        room = SharedRoom(memory, [channel], 7)
        own = room.take(PART)
        part = other.channel.mapped.room(7, PART)
        assert own is not None
        assert part is not None
        own[:], part[:] = b"a" * PART, b"b" * PART
        assert len(theirs.pinned) == 1
        room.arrived(1, written=True)
        assert bytes(room.whole or b"") == b"a" * PART + b"b" * PART
        del part
        assert list(memory.dropped) == [0]  # it is not needed, and no free memory is kept

        loan = Loan(1, 8, 0)
        where = memory.lend(memoryview(b"c" * PART), loan)
        channel.send(Frame(Op.DROP, 0, tuple(memory.dropped)))
        channel.send(Frame(Op.BODY, 8, (0, *where)))
        assert list(other.frames.get(timeout=60).ints) == [0, *where]
        assert other.channel.mapped.view(*where) == b"c" * PART
        assert len(theirs.pinned) == 1  # the first is given up
        assert list(memory.dropped) == [0]
        memory.taken(loan)
        assert list(memory.dropped) == [0, 1]
        channel.send(Frame(Op.DROP, 0, (1,)))
        channel.send(Frame(Op.END, 0))
        other.frames.get(timeout=60)
        with pytest.raises(RuntimeError, match="cannot map memory"):
            other.channel.mapped.view(*where)
        assert not theirs.pinned
        assert not mine.pinned


@pytest.mark.process
def test_without_memory_that_both_have_ranks_send_their_parts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from semantic.adapters.mlx.ranks import shared_memory

    def full(*_: object) -> int:
        raise OSError("no memory")

    monkeypatch.setattr(os, "memfd_create", full, raising=False)
    with one_machine() as (channel, other):
        memory = shared_memory.SharedMemory([channel], None)
        room = shared_memory.SharedRoom(memory, [channel], 7)
        assert room.take(PART) is None
        assert other.channel.mapped.room(7, PART) is None
        room.arrived(1, written=True)
        assert memory.lend(memoryview(bytes(PART)), shared_memory.Loan(1, 8, 0)) == ()
        sent: Future[Data] = Future()
        sent.set_result(b"b")
        assert bytes(shared_memory.GatheredBody(b"a", [sent], room).wait()) == b"ab"


@pytest.mark.process
def test_only_this_user_may_connect_on_one_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    from semantic_fleet.ranks.channel import is_of_this_user

    here, there = socket.socketpair(socket.AF_UNIX)
    with here, there:
        assert is_of_this_user(here)
        user = os.geteuid()
        monkeypatch.setattr(os, "geteuid", lambda: user + 1)
        assert not is_of_this_user(here)


@pytest.mark.process
def test_ranks_of_two_machines_need_what_seals_their_frames(
    pair: tuple[socket.socket, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    from semantic.domain.errors import BackendError
    from semantic_fleet.ranks.channel import Channel

    name = "cryptography.hazmat.primitives.ciphers.aead"
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(BackendError, match=r"cannot seal .*semantic-engine\[fleet\]"):
        Channel(pair[0], 0, 5.0, mapped(), keys()[0])


def test_ranks_that_others_can_reach_need_a_secret(tmp_path: Path) -> None:
    far, near = (read_grid(ring(tmp_path, hosts)) for hosts in (TWO, HERE))
    assert far is not None
    assert near is not None
    assert with_secret(near, None).secret == b""
    assert with_secret(far, b"known").secret == b"known"
    assert "known" not in repr(with_secret(far, b"known"))
    with pytest.raises(InvalidRequestError, match=r"10\.0\.0\.1.*expected one --fleet-secret-file"):
        with_secret(far, None)


class Ends:
    """A group of three ranks that records why it ends."""

    size, group, rank = 3, None, 0

    def __init__(self) -> None:
        self.reasons: list[str] = []
        self.links = self

    def end(self, reason: str) -> None:
        self.reasons.append(reason)


def test_a_call_that_fails_on_every_rank_ends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    from semantic.adapters.mlx.ranks import leading
    from semantic.domain.errors import BackendError

    ranks = Ends()
    outcomes = leading.Outcomes(ranks)  # type: ignore[arg-type]
    outcomes.failed_there(0, 1, "full")
    outcomes.failed_there(0, 2, "full")
    outcomes.failed_here(0, BackendError("full"))
    outcomes.succeeded(1)
    assert ranks.reasons == []
    outcomes.failed_there(1, 2, "late")
    outcomes.failed_there(2, 1, "early")
    assert ranks.reasons == ["rank 2 failed alone: late"]
    outcomes.succeeded(2)
    assert ranks.reasons[1:] == ["rank 1 failed alone: early"]
    monkeypatch.setattr(leading, "_AGREE_SECONDS", 0.0)
    outcomes.failed_there(3, 1, "both")
    outcomes.failed_here(3, BackendError("not all"))
    assert ranks.reasons[2:] == ["rank 0 failed alone: not all"]


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("llama", r"must divide num_attention_heads \(4\)"),
        ("gemma3", "cannot divide a gemma3_text"),
    ],
)
def test_models_that_cannot_be_divided_are_refused(name: str, reason: str) -> None:
    from semantic.adapters.mlx.ranks.shard import shard_model
    from semantic.domain.errors import UnsupportedModelError
    from tests.support.tiny_models import tiny_model

    with pytest.raises(UnsupportedModelError, match=reason):
        shard_model(tiny_model(name), Ends())  # type: ignore[arg-type]


@pytest.mark.parametrize("quantized", [False, True])
def test_a_layer_of_some_rows_computes_what_a_linear_one_does(quantized: bool) -> None:
    import mlx.core as mx
    from mlx.nn.layers.distributed import shard_linear
    from mlx.nn.layers.linear import Linear

    from semantic.adapters.mlx.ranks.shard import _WITHOUT_GRADIENTS

    linear = Linear(64, 32)
    layer = linear.to_quantized(64, 8) if quantized else linear
    part = shard_linear(layer, "all-to-sharded", group=mx.distributed.init())
    x = mx.random.normal((3, 64), key=mx.random.key(1))
    expected = part(x)
    part.__class__ = _WITHOUT_GRADIENTS[type(part)]
    assert mx.array_equal(part(x), expected).item()


def test_ranks_with_other_files_are_refused() -> None:
    from semantic.adapters.mlx.ranks.shard import require_same
    from semantic.domain.errors import BackendError

    require_same([b"a", b"a"], "model")
    with pytest.raises(BackendError, match="rank 2 has a different model than rank 0"):
        require_same([b"a", b"a", b"b"], "model")
