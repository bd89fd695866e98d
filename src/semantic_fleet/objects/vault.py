"""Vault: the keys of tenants, and where their objects are.

A tenant's key is derived from the fleet's secret, its tag and a random salt in an object of its
own. Deleting that object deletes the tenant: nothing that it has stored can be read any more, and
what it stores next has another key and another folder. Knows no contents.

    tenants/ID        the salt, and a proof that it is this tenant's
    ID                HMAC of the tag, which reveals neither the tag nor the tenant's name
    ID-SALT           the folder of its objects in each namespace, of ID and the salt's digest
"""

from __future__ import annotations

import hmac
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from semantic.domain.identity import digest
from semantic_fleet.objects.objects import Objects
from semantic_fleet.objects.sealing import derived

TENANTS = "tenants"
SALT_SECONDS = 60.0
"""How long a salt is used until it is read again: so long after a deletion other replicas may still
read what they had, and write what is lost."""
_SALT_BYTES = 32
_PROOF_BYTES = 16
_NAME_BYTES = 16


@dataclass(frozen=True, slots=True, repr=False)
class Tenant:
    """A tenant's folder and key, which is never shown."""

    folder: str
    key: bytes


class Vault:
    """Keys of the tenants of one fleet in one object store. Thread-safe."""

    def __init__(
        self,
        objects: Objects,
        secret: bytes,
        *,
        clock: Callable[[], float] = time.monotonic,
        renewed: Callable[[bytes], None] = lambda _: None,
    ) -> None:
        """`secret` is the fleet's, 32 bytes. `renewed` gets the tag of a tenant that has another
        key than it had: whatever was stored before is gone."""
        self._objects = objects
        self._secret = secret
        self._clock = clock
        self._renewed = renewed
        self._lock = threading.Lock()
        self._known: dict[bytes, tuple[float, Tenant]] = {}

    def tenant(self, tag: bytes) -> Tenant:
        """The folder and key of the tenant with this tag, made if there are none.

        Raises UnavailableError.
        """
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
        """Delete the key of the tenant with this tag; whether there was one. Raises
        UnavailableError."""
        was_there = self._objects.size(self._path(tag)) is not None
        self._objects.delete(self._path(tag))
        with self._lock:
            self._known.pop(tag, None)
        return was_there

    def erase(self, tag: bytes) -> int:
        """`forget`, and delete all objects in the tenant's folders, whichever key they had; how
        many there were.

        Replicas write to its last folder for `SALT_SECONDS` more; the janitor deletes that.
        """
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
        """The tenant's salt: the first that a replica has written."""
        path = self._path(tag)
        for _ in range(2):  # another replica may create it in between
            try:
                found = bytes(self._objects.get(path))
            except FileNotFoundError:
                new = os.urandom(_SALT_BYTES)
                if self._objects.create(path, new + self._proof(tag, new)):
                    return new
                continue
            salt = found[:_SALT_BYTES]
            if hmac.compare_digest(found[_SALT_BYTES:], self._proof(tag, salt)):
                return salt
            break
        new = os.urandom(_SALT_BYTES)  # a damaged one: what it locked is lost
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
    """The folder of the tenant with the name ID that its key is for; None if it has no key. Raises
    UnavailableError."""
    try:
        found = bytes(objects.get(f"{TENANTS}/{name}"))
    except FileNotFoundError:
        return None
    return _folder(name, found[:_SALT_BYTES])


def _folder(name: str, salt: bytes) -> str:
    return f"{name}-{digest('remote-salt-v1', salt)[:8].hex()}"
