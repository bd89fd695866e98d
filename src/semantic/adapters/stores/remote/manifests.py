"""Manifests: sealed manifests of agents in an object store, each generation an object of its own.

Objects are created, never changed, so that of two replicas that save one agent at once each gets a
generation. Knows not which agents there are, nor their blocks.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace

from semantic.adapters.stores.disk.entries import agent_key
from semantic.adapters.stores.disk.manifest_file import (
    FiledManifest,
    decode_manifest,
    encode_manifest,
)
from semantic.adapters.stores.remote.names import Folder, generation_of, manifest_identity
from semantic.adapters.stores.remote.objects import (
    PAGE,
    Listed,
    Objects,
    UnavailableError,
)
from semantic.adapters.stores.remote.sealing import seal, unsealed
from semantic.adapters.stores.remote.vault import Vault
from semantic.domain.block_hash import Scope
from semantic.domain.stored import Manifest

_GENERATIONS = 4
"""Generations that are tried while other replicas save the same agent."""


class Manifests:
    """The manifests of all scopes in one object store. Thread-safe.

    Every call may raise UnavailableError.
    """

    def __init__(self, objects: Objects, vault: Vault) -> None:
        self._objects = objects
        self._vault = vault

    def newest(self, scope: Scope, agent_id: str) -> Listed | None:
        """The object of the newest manifest, see `generation_of`; None if there is none."""
        listed = self._objects.listed(self._folder(scope).agent(agent_id), PAGE)
        return max(listed, key=generation_of, default=None)

    def read(self, scope: Scope, agent_id: str, listed: Listed) -> Manifest:
        """The manifest in an object. Raises FileNotFoundError, DamagedError, MismatchError and
        NewerFormatError."""
        key, generation = agent_key(scope, agent_id), generation_of(listed)
        data = self._objects.get(listed.path)
        sealed_as = manifest_identity(key, generation)
        contents = unsealed(self._folder(scope).tenant.key, sealed_as, data)
        return decode_manifest(contents, key, generation).manifest

    def save(self, manifest: Manifest, before: int) -> Manifest | None:
        """Write the next generation, after `before` and all that are there; the manifest with it.

        None if others were faster each time.
        """
        newest = self.newest(manifest.scope, manifest.agent_id)
        first = 1 + max(before, 0 if newest is None else generation_of(newest))
        for generation in range(first, first + _GENERATIONS):
            own = replace(manifest, generation=generation)
            if self._create(own):
                if newest is not None:
                    with suppress(UnavailableError):  # it is superseded, wherever it is
                        self._objects.delete(newest.path)
                return own
        return None

    def delete(self, scope: Scope, agent_id: str) -> None:
        """Delete all generations."""
        for one in self._objects.listed(self._folder(scope).agent(agent_id), PAGE):
            self._objects.delete(one.path)

    def _create(self, own: Manifest) -> bool:
        key, folder = agent_key(own.scope, own.agent_id), self._folder(own.scope)
        data = encode_manifest(FiledManifest(own, 0))
        sealed = seal(folder.tenant.key, manifest_identity(key, own.generation), data)
        return self._objects.create(folder.manifest(own.agent_id, own.generation), sealed)

    def _folder(self, scope: Scope) -> Folder:
        return Folder(scope, self._vault.tenant(scope.tenant))
