"""Sealed objects: bytes encrypted and authenticated in chunks, bound to their identity.

    offset  bytes
         0      8  magic
         8      4  format version
        12      4  size of a chunk
        16      8  size of the contents
        24     16  random salt
        40     16  keyed digest of the identity
        56      8  xxh3-64 of the 56 bytes before it
        64      …  the contents in chunks of 1 MiB, each followed by its tag of 16 bytes

HKDF derives each object's key from the tenant's key and the salt. A chunk's nonce contains its
number, so a reader detects a moved or missing chunk.
"""

from __future__ import annotations

import hmac
import os
import struct
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import xxhash
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from semantic.adapters.stores.disk.block_file import MAX_BODY_BYTES
from semantic.adapters.stores.disk.entries import DamagedError, MismatchError, NewerFormatError
from semantic.domain.identity import digest
from semantic_fleet.objects.objects import Objects

if TYPE_CHECKING:
    from typing_extensions import Buffer


VERSION = 1
CHUNK = 1 << 20
TAG = 16
READ_CHUNKS = 8
"""The number of chunks that one request reads."""
IDLE_SECONDS = 5.0
"""Seconds without sealing after which to free the memory for sealing."""

_MAGIC = b"SEMSEAL1"
_FIELDS = struct.Struct("<8sIIQ16s16s")
_SUM_BYTES = 8
FRAME = _FIELDS.size + _SUM_BYTES
_NONCE = struct.Struct(">?xxxQ")
_SALT_BYTES = 16

Fetch = Callable[[Iterable[tuple[int, int]]], Iterator["Buffer"]]
"""Yields the bytes of an object for each pair (start, stop), in order."""


def sealed_bytes(n_bytes: int) -> int:
    """Return the size of a sealed object in bytes."""
    return FRAME + n_bytes + TAG * _n_chunks(n_bytes)


def contents_bytes(n_sealed: int) -> int | None:
    """Return the size of the contents in bytes. Returns None if `n_sealed` is impossible."""
    rest = n_sealed - FRAME
    n_bytes = rest - TAG * max(1, -(-rest // (CHUNK + TAG)))
    return n_bytes if n_bytes >= 0 and sealed_bytes(n_bytes) == n_sealed else None


def derived(key: bytes, salt: bytes, purpose: bytes) -> bytes:
    """Derive a key of 32 bytes by HKDF-SHA256."""
    return HKDF(SHA256(), 32, salt, purpose).derive(key)


def seal(
    key: bytes, identity: bytes, contents: Buffer, into: memoryview | None = None
) -> memoryview:
    """Encrypt `contents` under `identity`. Writes the result to `into`, or to new memory."""
    data = memoryview(contents).cast("B")
    salt = os.urandom(_SALT_BYTES)
    sealed = memoryview(bytearray(sealed_bytes(len(data)))) if into is None else into
    frame = _frame(key, identity, len(data), salt)
    sealed[:FRAME] = frame
    cipher = AESGCM(derived(key, salt, b"object"))
    for number in range(n_chunks := _n_chunks(len(data))):
        start, at = number * CHUNK, FRAME + number * (CHUNK + TAG)
        chunk = data[start : start + CHUNK]
        nonce = _NONCE.pack(number + 1 == n_chunks, number)
        cipher.encrypt_into(nonce, chunk, frame + identity, sealed[at : at + len(chunk) + TAG])
    return sealed


class SealingMemory:
    """Reusable memory for sealed bodies. Thread-safe. Allocating memory takes several times as long
    as sealing."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._free: list[bytearray] = []
        self._was_used = False
        self._is_closed = False
        self._timer: threading.Timer | None = None

    @property
    def n_bytes(self) -> int:
        """The size of the memory that is free for reuse, in bytes."""
        with self._lock:
            return sum(map(len, self._free))

    @contextmanager
    def piece(self, n_bytes: int) -> Iterator[memoryview]:
        """Yield memory of undefined content. The memory is valid only inside the `with` block. It
        is not reused if a reference to it remains."""
        memory = self._take(n_bytes)
        view = memoryview(memory)[:n_bytes]
        yield view
        try:
            view.release()
            memory.append(memory.pop())  # raises if another view exists
        except BufferError:
            return
        self._give_back(memory)

    def give_back_unused(self) -> None:
        """Free the memory if nothing was sealed since the last call."""
        with self._lock:
            self._timer = None
            if self._was_used:
                self._watch()
            else:
                self._free.clear()

    def close(self) -> None:
        """Free all memory. Memory in use returns to the system at the end of its use."""
        with self._lock:
            self._is_closed = True
            self._free.clear()
            if self._timer is not None:
                self._timer.cancel()

    def _take(self, n_bytes: int) -> bytearray:
        with self._lock:
            fits = [at for at, one in enumerate(self._free) if len(one) >= n_bytes]
            if fits:
                return self._free.pop(min(fits, key=lambda at: len(self._free[at])))
            if self._free:
                self._free.pop()  # a larger piece replaces it
        return bytearray(n_bytes)

    def _give_back(self, memory: bytearray) -> None:
        with self._lock:
            if self._is_closed:
                return
            self._free.append(memory)
            self._was_used = True
            if self._timer is None:
                self._watch()

    def _watch(self) -> None:
        """The caller holds the lock."""
        self._was_used = False
        self._timer = threading.Timer(IDLE_SECONDS, self.give_back_unused)
        self._timer.name, self._timer.daemon = "remote", True
        self._timer.start()


def unsealed(key: bytes, identity: bytes, data: Buffer) -> bytes:
    """Return the contents of a small sealed object. Raises the same errors as `chunks`."""
    view = memoryview(data).cast("B")
    n_bytes = contents_bytes(len(view))
    if n_bytes is None:
        raise DamagedError("truncated")
    found = chunks(key, identity, n_bytes, lambda each: (view[a:b] for a, b in each))
    return b"".join(map(bytes, found))


def chunks(key: bytes, identity: bytes, n_bytes: int, fetch: Fetch) -> Iterator[memoryview]:
    """Yield the verified contents of an object in pieces. A piece is valid until the next one.
    Raises DamagedError, NewerFormatError, MismatchError for another object, and the same errors as
    `fetch`."""
    n_chunks, cipher, header = _n_chunks(n_bytes), None, b""
    scratch = memoryview(bytearray(min(CHUNK, n_bytes)))
    firsts = range(0, n_chunks, READ_CHUNKS)
    ranges = [_range(first, n_bytes) for first in firsts]
    for first, (start, stop), part in zip(firsts, ranges, fetch(ranges), strict=True):
        read = memoryview(part).cast("B")
        if cipher is None:
            salt = _opened_frame(key, identity, n_bytes, read)
            cipher, header = AESGCM(derived(key, salt, b"object")), bytes(read[:FRAME]) + identity
            read = read[FRAME:]
        if len(read) != stop - max(start, FRAME):
            raise DamagedError("truncated")
        for number in range(first, min(first + READ_CHUNKS, n_chunks)):
            piece, read = read[: CHUNK + TAG], read[CHUNK + TAG :]
            plain = scratch[: len(piece) - TAG]
            nonce = _NONCE.pack(number + 1 == n_chunks, number)
            try:
                cipher.decrypt_into(nonce, piece, header, plain)
            except InvalidTag:
                raise DamagedError("sealed body") from None
            yield plain


def _range(first: int, n_bytes: int) -> tuple[int, int]:
    """Return the byte range of at most `READ_CHUNKS` chunks. For chunk 0, it includes the frame
    before the chunk."""
    last = min(first + READ_CHUNKS, _n_chunks(n_bytes))
    start = FRAME + first * (CHUNK + TAG) if first else 0
    return start, min(FRAME + last * (CHUNK + TAG), sealed_bytes(n_bytes))


def _frame(key: bytes, identity: bytes, n_bytes: int, salt: bytes) -> bytes:
    mark = hmac.digest(key, identity, "sha256")[:16]
    fields = _FIELDS.pack(_MAGIC, VERSION, CHUNK, n_bytes, salt, mark)
    return fields + xxhash.xxh3_64_digest(fields)


def _opened_frame(key: bytes, identity: bytes, n_bytes: int, read: memoryview) -> bytes:
    if len(read) < FRAME:
        raise DamagedError("truncated")
    fields = bytes(read[: _FIELDS.size])
    magic, version, chunk, found, salt, _ = _FIELDS.unpack(fields)
    if magic != _MAGIC or xxhash.xxh3_64_digest(fields) != bytes(read[_FIELDS.size : FRAME]):
        raise DamagedError("frame")
    if version > VERSION:
        raise NewerFormatError(f"format {version}")
    if chunk != CHUNK or found > MAX_BODY_BYTES:
        raise DamagedError("frame")
    if not hmac.compare_digest(_frame(key, identity, found, salt), bytes(read[:FRAME])):
        raise MismatchError("header")
    if found != n_bytes:
        raise MismatchError("size")
    return bytes(salt)


def _n_chunks(n_bytes: int) -> int:
    return max(1, -(-n_bytes // CHUNK))


TENANTS = "tenants"
SALT_SECONDS = 60.0
"""Seconds between two reads of a salt. Other replicas may use a deleted tenant's key for this
long."""
_TENANT_SALT_BYTES = 32
_PROOF_BYTES = 16
_NAME_BYTES = 16


@dataclass(frozen=True, slots=True, repr=False)
class Tenant:
    """A tenant's folder and key. Log lines never contain the key."""

    folder: str
    key: bytes


class Vault:
    """Keys of the tenants of a fleet. Thread-safe.

    A tenant's key derives from the fleet's secret, its tag and a stored random salt. Without the
    salt, the tenant's objects are unreadable.

        tenants/ID        the salt, and a proof that the salt is this tenant's
        ID                HMAC of the tag, which reveals neither the tag nor the tenant's name
        ID-SALT           the tenant's folder in each namespace: ID and the salt's digest
    """

    def __init__(
        self,
        objects: Objects,
        secret: bytes,
        *,
        clock: Callable[[], float] = time.monotonic,
        renewed: Callable[[bytes], None] = lambda _: None,
    ) -> None:
        """`secret` is the fleet's secret of 32 bytes. `renewed` receives the tag of each tenant
        with a new key."""
        self._objects = objects
        self._secret = secret
        self._clock = clock
        self._renewed = renewed
        self._lock = threading.Lock()
        self._known: dict[bytes, tuple[float, Tenant]] = {}

    def tenant(self, tag: bytes) -> Tenant:
        """Return the tenant's folder and key. Creates a missing key. Raises UnavailableError."""
        with self._lock:
            until, found = self._known.get(tag, (0.0, None))
        if found is not None and self._clock() < until:
            return found
        made = self._derived(tag, self._salt(tag))
        with self._lock:
            _, before = self._known.get(tag, (0.0, None))
            self._known[tag] = self._clock() + SALT_SECONDS, made
        if before is not None and before != made:
            self._renewed(tag)
        return made

    def forget(self, tag: bytes) -> bool:
        """Delete the tenant's key. Returns True if the key existed. Raises UnavailableError."""
        was_there = self._objects.size(self._path(tag)) is not None
        self._objects.delete(self._path(tag))
        with self._lock:
            self._known.pop(tag, None)
        return was_there

    def erase(self, tag: bytes) -> int:
        """Delete the tenant's key and all its objects. Returns the number of objects. Replicas may
        write more objects for `SALT_SECONDS`."""
        self.forget(tag)
        prefix, erased = f"{self._name(tag)}-", 0
        for above in self._objects.folders():
            for folder in self._objects.folders(above):
                if not folder.rsplit("/", 1)[-1].startswith(prefix):
                    continue
                for page in self._objects.pages(folder):
                    self._objects.delete_all([one.path for one in page])
                    erased += len(page)
        return erased

    def _salt(self, tag: bytes) -> bytes:
        """Return the tenant's salt. If several replicas write a salt, the first one counts."""
        path = self._path(tag)
        for _ in range(2):  # another replica may create the salt in between
            try:
                found = bytes(self._objects.get(path))
            except FileNotFoundError:
                new = os.urandom(_TENANT_SALT_BYTES)
                if self._objects.create(path, new + self._proof(tag, new)):
                    return new
                continue
            salt = found[:_TENANT_SALT_BYTES]
            if hmac.compare_digest(found[_TENANT_SALT_BYTES:], self._proof(tag, salt)):
                return salt
            break
        new = os.urandom(_TENANT_SALT_BYTES)  # damaged: the tenant's objects are lost
        self._objects.replace(path, new + self._proof(tag, new))
        return new

    def _derived(self, tag: bytes, salt: bytes) -> Tenant:
        folder = _folder(self._name(tag), salt)
        return Tenant(folder, derived(self._secret, salt, b"semantic-remote-v1" + tag))

    def _proof(self, tag: bytes, salt: bytes) -> bytes:
        return hmac.digest(self._secret, b"remote-proof-v1" + tag + salt, "sha256")[:_PROOF_BYTES]

    def _name(self, tag: bytes) -> str:
        return hmac.digest(self._secret, b"remote-name-v1" + tag, "sha256")[:_NAME_BYTES].hex()

    def _path(self, tag: bytes) -> str:
        return f"{TENANTS}/{self._name(tag)}"


def live_folder(objects: Objects, name: str) -> str | None:
    """Return the tenant's folder. Returns None without a key. Raises UnavailableError."""
    try:
        found = bytes(objects.get(f"{TENANTS}/{name}"))
    except FileNotFoundError:
        return None
    return _folder(name, found[:_TENANT_SALT_BYTES])


def _folder(name: str, salt: bytes) -> str:
    return f"{name}-{digest('remote-salt-v1', salt)[:8].hex()}"
