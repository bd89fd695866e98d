"""The formats of an exported agent's two files: a JSON document and a safetensors container.

The document has the agent's tokens, the list of its block bodies, and a checksum. The container has
the bodies, each as one tensor of bytes, in order and without gaps.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass

import xxhash

from semantic.domain.block_hash import HASH_BYTES, Part
from semantic.domain.errors import InvalidRequestError
from semantic.domain.value_objects import BLOCK_TOKENS

FORMAT = "semantic-agent"
VERSION = 1

_TOKEN_IDS = 1 << 32
_SUM_BYTES = 16
_BODY_BYTES = (1 << 30) + 1
"""One more than the maximum size of a body in bytes, 256 tokens of 4 MiB each."""
_HEADER_LENGTH_BYTES = 8
_HEADER_ALIGNMENT = 8

_OPENING = b'{"checksum": "'
_ZEROS = b"0" * (2 * _SUM_BYTES)
_SUM_END = len(_OPENING) + len(_ZEROS)

_PARTS = {part: number for number, part in enumerate(Part)}


@dataclass(frozen=True, slots=True)
class BodyEntry:
    """A block body in the document's list. `block` is the block's index."""

    block: int
    part: Part
    n_bytes: int
    checksum: str

    @property
    def name(self) -> str:
        """The name of the body's tensor."""
        return f"{self.block:06d}.{self.part.value}"


@dataclass(frozen=True, slots=True)
class AgentDocument:
    """An exported agent, and the list of its block bodies."""

    namespace: bytes
    layout: str
    agent_id: str
    model: str
    note: str
    prompt_tokens: int
    token_ids: tuple[int, ...]
    bodies: tuple[BodyEntry, ...]

    @property
    def n_bytes(self) -> int:
        return sum(body.n_bytes for body in self.bodies)


def checksum(data: bytes) -> str:
    """Return the xxh3-128 of `data` in hexadecimal digits."""
    return xxhash.xxh3_128_hexdigest(data)


def write_document(document: AgentDocument) -> bytes:
    fields = {
        "format": FORMAT,
        "version": VERSION,
        "namespace": document.namespace.hex(),
        "layout": document.layout,
        "agent": document.agent_id,
        "model": document.model,
        "note": document.note,
        "prompt_tokens": document.prompt_tokens,
        "token_ids": document.token_ids,
        "bodies": [
            {"block": b.block, "part": b.part, "bytes": b.n_bytes, "xxh3_128": b.checksum}
            for b in document.bodies
        ],
    }
    # ASCII: a lone surrogate in a name can be escaped, but has no UTF-8 encoding.
    rest = b'", ' + json.dumps(fields).encode("ascii")[1:] + b"\n"
    return _OPENING + checksum(_OPENING + _ZEROS + rest).encode("ascii") + rest


def read_document(data: bytes) -> AgentDocument:
    """Parse and check a document. Raises an InvalidRequestError that names the first bad field."""
    fields = _verified(data)
    kind, version = fields.get("format"), fields.get("version")
    if kind != FORMAT:
        raise InvalidRequestError(f"format must be {FORMAT!r}, got {kind!r:.40}")
    if type(version) is not int or version != VERSION:
        raise InvalidRequestError(f"version must be {VERSION}, got {version!r:.40}")
    token_ids = tuple(_number("token_ids", one, _TOKEN_IDS) for one in _list("token_ids", fields))
    n_blocks = -(-len(token_ids) // BLOCK_TOKENS)
    bodies = tuple(_body(one, n_blocks) for one in _list("bodies", fields))
    document = AgentDocument(
        namespace=_hex("namespace", fields.get("namespace"), HASH_BYTES),
        layout=_text("layout", fields),
        agent_id=_text("agent", fields),
        model=_text("model", fields),
        note=_text("note", fields),
        prompt_tokens=_number("prompt_tokens", fields.get("prompt_tokens"), len(token_ids) + 1),
        token_ids=token_ids,
        bodies=bodies,
    )
    _require_order(bodies)
    _require_equal_sizes(bodies, len(token_ids))
    return document


def container_header(bodies: Sequence[BodyEntry]) -> bytes:
    """Return the container's bytes before the first body."""
    entries: dict[str, object] = {}
    offset = 0
    for body in bodies:
        entries[body.name] = {
            "dtype": "U8",
            "shape": [body.n_bytes],
            "data_offsets": [offset, offset + body.n_bytes],
        }
        offset += body.n_bytes
    text = json.dumps(entries, separators=(",", ":")).encode("ascii")
    text += b" " * (-len(text) % _HEADER_ALIGNMENT)
    return len(text).to_bytes(_HEADER_LENGTH_BYTES, "little") + text


def tokens_in_block(block: int, n_tokens: int) -> int:
    """Return the number of tokens in the block with index `block`."""
    return min(BLOCK_TOKENS, n_tokens - block * BLOCK_TOKENS)


def _verified(data: bytes) -> dict[str, object]:
    """Return the document's fields. Raises InvalidRequestError unless the checksum matches."""
    given = data[len(_OPENING) : _SUM_END]
    zeroed = _OPENING + _ZEROS + data[_SUM_END:]
    if not data.startswith(_OPENING) or given != checksum(zeroed).encode("ascii"):
        raise InvalidRequestError("the checksum does not match: the document is damaged")
    try:
        fields = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise InvalidRequestError("the document is not JSON") from error
    if not isinstance(fields, dict):
        raise InvalidRequestError("expected a JSON object")
    return fields


def _body(value: object, n_blocks: int) -> BodyEntry:
    if not isinstance(value, dict) or set(value) != {"block", "part", "bytes", "xxh3_128"}:
        raise InvalidRequestError("bodies must be objects with block, part, bytes and xxh3_128")
    if value["part"] not in list(Part):
        raise InvalidRequestError(f"part must be one of {', '.join(Part)}")
    return BodyEntry(
        _number("block", value["block"], n_blocks),
        Part(value["part"]),
        _number("bytes", value["bytes"], _BODY_BYTES),
        _hex("xxh3_128", value["xxh3_128"], _SUM_BYTES).hex(),
    )


def _require_order(bodies: Sequence[BodyEntry]) -> None:
    places = [(body.block, _PARTS[body.part]) for body in bodies]
    if any(after <= before for before, after in itertools.pairwise(places)):
        raise InvalidRequestError("bodies must be in ascending order without duplicates")


def _require_equal_sizes(bodies: Sequence[BodyEntry], n_tokens: int) -> None:
    """Raise InvalidRequestError if bodies of one part have different bytes per token."""
    per_token: dict[Part, tuple[int, int]] = {}
    for body in bodies:
        if body.part is Part.CHECKPOINT:
            continue
        size = divmod(body.n_bytes, tokens_in_block(body.block, n_tokens))
        if size[1] or per_token.setdefault(body.part, size) != size:
            raise InvalidRequestError(
                f"body {body.name} has {body.n_bytes} bytes, not the same number per token "
                "as the other bodies of its part"
            )


def _list(name: str, fields: dict[str, object]) -> list[object]:
    value = fields.get(name)
    if not isinstance(value, list):
        raise InvalidRequestError(f"{name} must be a list")
    return value


def _text(name: str, fields: dict[str, object]) -> str:
    value = fields.get(name)
    if not isinstance(value, str):
        raise InvalidRequestError(f"{name} must be text")
    return value


def _number(name: str, value: object, below: int) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < below:
        raise InvalidRequestError(f"{name} must hold whole numbers below {below}")
    return value


def _hex(name: str, value: object, n_bytes: int) -> bytes:
    try:
        found = bytes.fromhex(value) if isinstance(value, str) else b""
    except ValueError:
        found = b""
    if len(found) != n_bytes or found.hex() != value:
        raise InvalidRequestError(f"{name} must be {2 * n_bytes} hexadecimal digits")
    return found
