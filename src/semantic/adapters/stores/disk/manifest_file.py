"""Encodes and verifies manifest files, each with a checksum, a JSON text and packed tokens.

    offset  bytes
         0      8  magic
         8      4  format version
        12      4  zero
        16     16  xxh3-128 of everything after it
        32      8  bytes of the JSON text
        40      8  number of tokens
        48      …  the JSON text, then the tokens, u32 each

All numbers are little-endian.
"""

from __future__ import annotations

import dataclasses
import json
import struct
from dataclasses import dataclass

import xxhash

from semantic.adapters.stores.disk.entries import (
    MAX_NUMBER,
    DamagedError,
    Entries,
    NewerFormatError,
    agent_key,
    manifest_entry,
)
from semantic.adapters.stores.disk.files import read_whole
from semantic.domain.block_hash import Scope, pack_tokens, unpack_tokens
from semantic.domain.match import CacheMiss, MatchEnd, MatchReport
from semantic.domain.request_parts import Change, Difference, PartKind
from semantic.domain.stored import Manifest, TurnEnd

VERSION = 1
MAX_BYTES = 1 << 28
"""The maximum size of a manifest's file in bytes, for some sixty million tokens."""

_MAGIC = b"SEMAGENT"
_FRAME = struct.Struct("<8sII16s")
_SIZES = struct.Struct("<QQ")
FRAME_BYTES = _FRAME.size + _SIZES.size
"""The length of a file's beginning that `require_size` checks."""


@dataclass(frozen=True, slots=True)
class ManifestFile:
    """A file's size and its first FRAME_BYTES, which identify its contents."""

    n_bytes: int
    frame: bytes

    @classmethod
    def of(cls, data: bytes) -> ManifestFile:
        """Return the description of a file that contains `data`."""
        return cls(len(data), data[:FRAME_BYTES])


@dataclass(frozen=True, slots=True)
class FiledManifest:
    """A manifest in its file. `order` grows with each save of any agent."""

    manifest: Manifest
    order: int

    @property
    def key(self) -> bytes:
        return agent_key(self.manifest.scope, self.manifest.agent_id)


def encode_manifest(filed: FiledManifest) -> bytes:
    """Return the contents of the manifest's file. Raises ValueError beyond MAX_BYTES."""
    manifest = filed.manifest
    fields = {
        "agent_id": manifest.agent_id,
        "namespace": manifest.scope.namespace.hex(),
        "tenant": manifest.scope.tenant.hex(),
        "salt": manifest.scope.salt.hex(),
        "generation": manifest.generation,
        "order": filed.order,
        "turns": min(manifest.turns, MAX_NUMBER),
        "pinned": manifest.pinned,
        "parent": manifest.parent,
        "prompt_tokens": manifest.prompt_tokens,
        "note": manifest.note,
        "model": manifest.model,
        "saved_at": manifest.saved_at,
        "match": None if manifest.match is None else dataclasses.asdict(manifest.match),
        "earlier": manifest.earlier,
    }
    # No ASCII escapes, because those of two adjacent lone surrogates would decode as one character.
    text = json.dumps(fields, ensure_ascii=False).encode("utf-8", "surrogatepass")
    rest = _SIZES.pack(len(text), len(manifest.token_ids)) + text + pack_tokens(manifest.token_ids)
    if _FRAME.size + len(rest) > MAX_BYTES:
        raise ValueError(f"a manifest has at most {MAX_BYTES} bytes, got {len(rest)}")
    return _FRAME.pack(_MAGIC, VERSION, 0, xxhash.xxh3_128_digest(rest)) + rest


def require_size(frame: bytes, file_bytes: int) -> None:
    """Check the beginning of a file. Raises NewerFormatError, or DamagedError unless the beginning
    is intact and fits `file_bytes`."""
    if len(frame) < FRAME_BYTES:
        raise DamagedError("truncated")
    magic, version, _, _ = _FRAME.unpack_from(frame)
    if magic != _MAGIC:
        raise DamagedError("magic")
    if version > VERSION:
        raise NewerFormatError(f"format {version}")
    n_text, n_tokens = _SIZES.unpack_from(frame, _FRAME.size)
    if file_bytes != FRAME_BYTES + n_text + 4 * n_tokens:
        raise DamagedError("truncated")
    if file_bytes > MAX_BYTES:
        raise DamagedError("too long")


def decode_manifest(data: bytes, key: bytes, generation: int) -> FiledManifest:
    """Return the manifest in `data`. Raises NewerFormatError, or DamagedError unless `data` is
    intact and for this agent and generation."""
    require_size(data, len(data))
    _, version, zero, checksum = _FRAME.unpack_from(data)
    n_text, _ = _SIZES.unpack_from(data, _FRAME.size)
    proven = memoryview(data)[_FRAME.size :]
    if version != VERSION or zero or xxhash.xxh3_128_digest(proven) != checksum:
        raise DamagedError("manifest checksum")
    tokens = unpack_tokens(data[FRAME_BYTES + n_text :])
    try:
        filed = _parse(data[FRAME_BYTES : FRAME_BYTES + n_text], tokens)
    except (KeyError, TypeError, ValueError, OverflowError, RecursionError):
        raise DamagedError("manifest fields") from None
    if filed.key != key or filed.manifest.generation != generation:
        raise DamagedError("identity")
    return filed


def read_manifest(
    entries: Entries, key: bytes, generation: int
) -> tuple[FiledManifest, ManifestFile]:
    """Return a verified manifest, and its file. Raises DamagedError, NewerFormatError or
    OSError."""
    with entries.opened(manifest_entry(key, generation)) as (fd, size):
        require_size(read_whole(entries.files, fd, FRAME_BYTES), size)
        data = read_whole(entries.files, fd, size)
        return decode_manifest(data, key, generation), ManifestFile.of(data)


def _parse(text: bytes, tokens: tuple[int, ...]) -> FiledManifest:
    fields = _Fields(json.loads(text.decode("utf-8", "surrogatepass")))
    scope = Scope(
        bytes.fromhex(fields.text("namespace")),
        bytes.fromhex(fields.text("tenant")),
        bytes.fromhex(fields.text_since("salt", "")),
    )
    match = fields.optional("match")
    parent = fields.optional("parent")
    generation = fields.counter("generation")
    manifest = Manifest(
        scope=scope,
        agent_id=fields.text("agent_id"),
        token_ids=tokens,
        generation=generation,
        turns=fields.counter_since("turns", generation),
        pinned=fields.flag("pinned"),
        parent=None if parent is None else fields.text("parent"),
        prompt_tokens=fields.whole("prompt_tokens"),
        note=fields.text("note"),
        model=fields.text("model"),
        saved_at=fields.number("saved_at"),
        match=None if match is None else _parse_match(_Fields(match)),
        earlier=fields.turns_since("earlier", len(tokens)),
    )
    return FiledManifest(manifest, fields.counter("order"))


def _parse_match(fields: _Fields) -> MatchReport:
    lost = fields.optional_since("lost")
    return MatchReport(
        prompt_tokens=fields.whole("prompt_tokens"),
        reused_tokens=fields.whole("reused_tokens"),
        end=MatchEnd(fields.text("end")),
        source=fields.text("source"),
        differs_at=fields.whole_or_none("differs_at"),
        expected=fields.whole_or_none("expected"),
        got=fields.whole_or_none("got"),
        seconds=fields.number("seconds"),
        lost=None if lost is None else _parse_lost(_Fields(lost)),
        any_chip=fields.flag_since("any_chip", before=False),
    )


def _parse_lost(fields: _Fields) -> CacheMiss:
    part = fields.optional("part")
    return CacheMiss(
        fields.whole("tokens"),
        fields.number("seconds"),
        None if part is None else _parse_part(_Fields(part)),
    )


def _parse_part(fields: _Fields) -> Difference:
    name = fields.optional("name")
    return Difference(
        PartKind(fields.text("kind")),
        Change(fields.text("change")),
        fields.whole_or_none("number"),
        None if name is None else fields.text("name"),
    )


def _whole(value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"expected a whole number, got {type(value).__name__}")
    return value


class _Fields:
    """The fields of a JSON object. Raises KeyError, TypeError, ValueError or OverflowError."""

    def __init__(self, loaded: object) -> None:
        if not isinstance(loaded, dict):
            raise TypeError(f"expected an object, got {type(loaded).__name__}")
        self._fields: dict[str, object] = loaded

    def optional(self, name: str) -> object:
        return self._fields[name]

    def optional_since(self, name: str) -> object:
        """Return the field `name`; None if the file's version lacks it."""
        return self._fields.get(name)

    def text(self, name: str) -> str:
        value = self._fields[name]
        if not isinstance(value, str):
            raise TypeError(name)
        return value

    def text_since(self, name: str, before: str) -> str:
        """Return the text `name`; `before` if the file's version lacks it."""
        return self.text(name) if name in self._fields else before

    def whole(self, name: str) -> int:
        return _whole(self._fields[name])

    def whole_or_none(self, name: str) -> int | None:
        return None if self._fields[name] is None else self.whole(name)

    def counter(self, name: str) -> int:
        value = self.whole(name)
        if not 0 <= value <= MAX_NUMBER:
            raise ValueError(name)
        return value

    def counter_since(self, name: str, before: int) -> int:
        """Return the counter `name`; `before` if the file's version lacks it."""
        return self.counter(name) if name in self._fields else before

    def turns_since(self, name: str, most: int) -> tuple[TurnEnd, ...]:
        """Return the turns `name`, of at most `most` tokens; none if the file's version lacks
        them."""
        pairs = self._fields.get(name, [])
        if not isinstance(pairs, list):
            raise TypeError(name)
        turns = tuple(TurnEnd(*map(_whole, pair)) for pair in pairs)
        if not all(0 <= one.prompt_tokens <= one.tokens <= most for one in turns):
            raise ValueError(name)
        return turns

    def flag(self, name: str) -> bool:
        value = self._fields[name]
        if not isinstance(value, bool):
            raise TypeError(name)
        return value

    def flag_since(self, name: str, *, before: bool) -> bool:
        """Return the flag `name`; `before` if the file's version lacks it."""
        return self.flag(name) if name in self._fields else before

    def number(self, name: str) -> float:
        value = self._fields[name]
        if not isinstance(value, int | float):
            raise TypeError(name)
        return float(value)
