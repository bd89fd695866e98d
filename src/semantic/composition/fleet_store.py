"""A fleet's object store for commands: a janitor's pass, its last report, and the end of a tenant.

Adapters are imported inside functions. Knows no engine.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from semantic.application.chat.replay import turns_owner
from semantic.composition.engine_settings import Settings
from semantic.composition.process_stores import require_objects
from semantic.domain.block_hash import tenant_tag
from semantic.domain.errors import InvalidRequestError, StoreError

if TYPE_CHECKING:
    from semantic.adapters.stores.remote.janitor import Report


@dataclass(frozen=True, slots=True)
class Forgotten:
    """What a tenant had in the object store."""

    n_objects: int
    had_keys: bool
    keeps_versions: bool
    """Whether the bucket keeps old versions of all that, and of the keys."""


def evict_remote(
    settings: Settings,
    wait: Callable[[float], None] = time.sleep,
    notify: Callable[[str], None] = lambda _: None,
) -> Report | None:
    """One pass of the janitor over the fleet's object store; None if another process is at it.

    Waits for a lease of a process that is gone, and lets `notify` know. Raises as
    `require_objects`, and StoreError if the object store fails.
    """
    if settings.remote_bytes is None:
        raise InvalidRequestError("remote_gb: expected the GiB that the object store may have")
    objects, secret = require_objects(settings)
    from semantic.adapters.stores.remote.janitor import Janitor
    from semantic.adapters.stores.remote.lease import PERIOD, RENEWALS, Lease

    lease, has_waited = Lease(objects), False
    with _failures():
        while not lease.acquire():
            if lease.is_renewed:
                return None
            if not has_waited:
                notify(
                    "another process has the janitor's lease: waiting to see whether it lives, "
                    f"{PERIOD / RENEWALS:.0f} to {PERIOD:.0f} seconds"
                )
            has_waited = True
            wait(PERIOD / RENEWALS)
        try:
            return Janitor(objects, secret, lease, settings.remote_bytes).run()
        finally:
            lease.release()


def last_pass(settings: Settings) -> Report | None:
    """What the janitor's last pass has found and done; None if there was none. Raises as
    `evict_remote`."""
    objects, _ = require_objects(settings)
    from semantic.adapters.stores.remote.janitor import read_report

    with _failures():
        return read_report(objects)


def keeps_versions(settings: Settings) -> bool:
    """Whether the bucket keeps old versions of what is deleted: then nothing is freed, and no key
    is gone. Raises as `evict_remote`."""
    objects, _ = require_objects(settings)
    with _failures():
        return objects.keeps_versions()


def forget_tenant(settings: Settings, name: str) -> Forgotten:
    """Delete the keys and all objects of the tenant `name`. Raises as `evict_remote`."""
    objects, secret = require_objects(settings)
    from semantic.adapters.stores.remote.remote_records import records_tag
    from semantic.adapters.stores.remote.vault import Vault

    vault = Vault(objects, secret)
    tags = tenant_tag(secret, name), records_tag(secret, turns_owner(name))
    with _failures():
        # All keys first: from then on nothing can be read.
        had_keys = sum(vault.forget(tag) for tag in tags) > 0
        return Forgotten(sum(map(vault.erase, tags)), had_keys, objects.keeps_versions())


@contextmanager
def _failures() -> Iterator[None]:
    """What the object store and the lease raise, as a StoreError."""
    from semantic.adapters.stores.remote.lease import LostLeaseError
    from semantic.adapters.stores.remote.objects import UnavailableError

    try:
        yield
    except (UnavailableError, LostLeaseError) as error:
        raise StoreError(f"the object store failed: {error}") from error
