"""Block bodies between a backend and a test: exported as bytes, written as a store writes them."""

from __future__ import annotations

from collections.abc import Sequence

from semantic.domain.block_hash import Part
from semantic.domain.stored import Body
from semantic.domain.value_objects import BLOCK_TOKENS, SequenceId
from semantic.ports.generation import BatchBackend, BodyTarget


def bytes_of_body(body: Body) -> bytes:
    """All bytes, waited for."""
    return body if isinstance(body, bytes) else bytes(body.wait())


def exported(
    backend: BatchBackend, sequence: SequenceId, part: Part, start: int, stop: int
) -> bytes:
    """The bytes of `export_block`."""
    return bytes_of_body(backend.export_block(sequence, part, start, stop))


def fill(targets: Sequence[BodyTarget], bodies: Sequence[bytes]) -> None:
    """Write each body where it belongs, as a store does, and give the memory up."""
    assert len(targets) == len(bodies)
    for target, body in zip(targets, bodies, strict=True):
        segments = target.open()
        at, room = 0, sum(map(len, segments))
        for segment in segments:
            n_bytes = len(segment) * len(body) // room
            segment[:n_bytes] = body[at : at + n_bytes]
            at += n_bytes
        assert at == len(body)
        target.close(BLOCK_TOKENS * len(body) // max(1, room))


def put(targets: Sequence[BodyTarget], bodies: Sequence[bytes]) -> None:
    """Give each body as a store that has it in memory does: a view, at any offset, that can only be
    read."""
    for target, body in zip(targets, bodies, strict=True):
        target.put(memoryview(b"x" + body)[1:])


class Segments:
    """A `BodyTarget` over memory that the test reads afterwards."""

    def __init__(self, segments: Sequence[memoryview]) -> None:
        self._segments = list(segments)

    def put(self, body: bytes | memoryview) -> None:
        fill([self], [bytes(body)])

    def open(self) -> list[memoryview]:
        return self._segments

    def close(self, n_tokens: int = 0) -> None:  # noqa: ARG002
        for segment in self._segments:
            segment.release()
        self._segments = []
