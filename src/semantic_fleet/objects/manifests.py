"""Encrypted manifests of agents in an object store. Each save writes a new generation. Thus
replicas never overwrite each other's manifests."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace

from semantic.adapters.stores.disk.entries import agent_key
from semantic.adapters.stores.disk.manifest_file import (
    FiledManifest,
    decode_manifest,
    encode_manifest,
)
from semantic.domain.block_hash import BlockHash, BlockKey, BlockLink, Part, Scope
from semantic.domain.prefix import continues, ends_of_turn
from semantic.domain.stored import BlockHeader, Manifest
from semantic.domain.value_objects import BLOCK_TOKENS
from semantic_fleet.objects.catalog import Catalog
from semantic_fleet.objects.names import Folder, generation_of, manifest_identity
from semantic_fleet.objects.objects import PAGE, Listed, Objects, UnavailableError
from semantic_fleet.objects.reading import Bodies
from semantic_fleet.objects.sealing import Vault, seal, unsealed

_GENERATIONS = 4
"""The maximum number of generations to try while other replicas save the same agent."""
_MOST_NEW = 1 << 12
"""The maximum number of new partial blocks to remember."""


class Manifests:
    """The manifests of all scopes. Thread-safe. Methods may raise UnavailableError."""

    def __init__(self, objects: Objects, vault: Vault) -> None:
        self._objects = objects
        self._vault = vault

    def newest(self, scope: Scope, agent_id: str) -> Listed | None:
        """Return the object that contains the newest manifest, or None."""
        listed = self._objects.listed(self._folder(scope).agent(agent_id), PAGE)
        return max(listed, key=generation_of, default=None)

    def read(self, scope: Scope, agent_id: str, listed: Listed) -> Manifest:
        """Return the manifest in an object. Raises FileNotFoundError and UnreadableError."""
        key, generation = agent_key(scope, agent_id), generation_of(listed)
        data = self._objects.get(listed.path)
        sealed_as = manifest_identity(key, generation)
        contents = unsealed(self._folder(scope).tenant.key, sealed_as, data)
        return decode_manifest(contents, key, generation).manifest

    def save(self, manifest: Manifest, before: int) -> Manifest | None:
        """Write `manifest` as a new generation and return that manifest. Returns None if other
        replicas always were faster."""
        newest = self.newest(manifest.scope, manifest.agent_id)
        first = 1 + max(before, 0 if newest is None else generation_of(newest))
        for generation in range(first, first + _GENERATIONS):
            own = replace(manifest, generation=generation)
            if self._create(own):
                if newest is not None:
                    with suppress(UnavailableError):  # a newer one exists somewhere
                        self._objects.delete(newest.path)
                return own
        return None

    def delete(self, scope: Scope, agent_id: str) -> None:
        """Delete all generations of an agent's manifest."""
        for one in self._objects.listed(self._folder(scope).agent(agent_id), PAGE):
            self._objects.delete(one.path)

    def _create(self, own: Manifest) -> bool:
        key, folder = agent_key(own.scope, own.agent_id), self._folder(own.scope)
        data = encode_manifest(FiledManifest(own, 0))
        sealed = seal(folder.tenant.key, manifest_identity(key, own.generation), data)
        return self._objects.create(folder.manifest(own.agent_id, own.generation), sealed)

    def _folder(self, scope: Scope) -> Folder:
        return Folder(scope, self._vault.tenant(scope.tenant))


class Ends:
    """The partial blocks at the ends of agents' turns. Thread-safe.

    After an agent's next turn, its previous partial blocks are deleted if the new ones contain
    their data. A block that several agents share stays.
    """

    def __init__(self, bodies: Bodies, catalog: Catalog) -> None:
        self._bodies = bodies
        self._catalog = catalog
        self._lock = threading.Lock()
        self._new: OrderedDict[BlockKey, None] = OrderedDict()

    def written(self, header: BlockHeader) -> None:
        """Record that this process wrote a body."""
        if header.link.is_full:
            return
        with self._lock:
            self._new[header.key] = None
            if len(self._new) > _MOST_NEW:
                self._new.popitem(last=False)

    def saved(self, newer: Manifest, older: Manifest | None) -> int:
        """Delete the partial blocks that the turn `newer` replaces. Returns their number. `older`
        is the agent's last known turn. Raises UnavailableError."""
        before = {} if older is None else _partial(ends_of_turn(older))
        own = _partial(ends_of_turn(newer))
        for name, link in own.items():
            if not self._is_new(link) and name not in before:
                self._bodies.share(link)
        if older is None or not continues(newer, older):
            return 0
        links = list(newer.scope.chain(newer.token_ids))
        points = [link.key(Part.CHECKPOINT) for link in (*own.values(), *links[-1:])]
        has_points = bool(self._catalog.find(points))
        # The end of a prompt has only checkpoints and the bodies that they need.
        ends = list(before.values()) if has_points else _ends_of_chain(older)
        replaced = [link for link in ends if link.hash not in own]
        agent = newer.scope, newer.agent_id
        users = self._catalog.agents.users([link.hash for link in replaced])
        return sum(
            self._delete(link, self._replaced_parts(link, links, has_points=has_points))
            for link in replaced
            if not users[link.hash] - {agent}
        )

    def _replaced_parts(
        self, link: BlockLink, links: Sequence[BlockLink], *, has_points: bool
    ) -> list[Part]:
        later = links[min(link.start // BLOCK_TOKENS, len(links) - 1)].key(Part.FULL)
        full = [Part.FULL] if self._catalog.find([later]) else []
        return full + ([Part.WINDOW, Part.CHECKPOINT] if has_points else [])

    def _delete(self, link: BlockLink, parts: Sequence[Part]) -> bool:
        if not parts or self._bodies.is_shared(link):
            return False
        self._bodies.delete_parts(link, parts)
        self._catalog.drop([link.key(part) for part in parts])
        return True

    def _is_new(self, link: BlockLink) -> bool:
        """Return True if only this process wrote the block, and only one turn ends with it."""
        known = self._catalog.find([link.key(part) for part in Part]).keys()
        with self._lock:
            is_new = known <= self._new.keys()
            for key in known & self._new.keys():
                del self._new[key]
        return is_new


def _partial(links: Sequence[BlockLink]) -> dict[BlockHash, BlockLink]:
    return {link.hash: link for link in links if not link.is_full}


def _ends_of_chain(turn: Manifest) -> list[BlockLink]:
    return list(_partial(ends_of_turn(turn)[:1]).values())
