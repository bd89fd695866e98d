"""Settings of an engine: what to build. Knows no part of it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from semantic.ports.ranks import PlacementPort

DEFAULT_MODEL = "semantic-tiny"
"""The model inside the package."""

ADAPTER_MARK = "+"
"""Between the names of a model and of its adapter."""


@dataclass(frozen=True, slots=True)
class NamedAdapter:
    """An adapter in `folder`, by the name that its model has behind that of its base."""

    name: str
    folder: Path

    def named(self, base: str) -> str:
        """The name of the model that is `base` under the adapter."""
        return f"{base}{ADAPTER_MARK}{self.name}"


@dataclass(frozen=True, slots=True)
class Settings:
    """What to build: `model`, or what it is under an `adapter`.

    The pool is limited by `pool_bytes` and `pool_blocks`; without either by `default_pool_bytes`.
    At most `max_batch` requests decode in one step.

    The store has a memory tier of `memory_bytes` (`default_memory_tier_bytes`) and, with
    `use_disk`, a disk tier of `disk_bytes` (`default_disk_bytes`) in the folder `store`
    (`default_store_folder`). Once `disk_bytes_a_day` are written only ends of turns are; its drive
    is rated for `disk_rated_bytes`.

    `process_bytes` is the memory that the process may have: of a server see `guarded_loop`, and of
    it the defaults are parts. The weights of one of several models may take `weights_bytes`.

    `any_chip` shares blocks with other kinds of chips: see `fingerprint`. `fleet_secret` is the
    file with the secret of tenants' tags, by default that in $SEMANTIC_FLEET_SECRET_FILE; without
    one every store has its own secret. `remote` is the URL of the object store that a fleet shares;
    with `remote_bytes` this process may evict what exceeds that there.
    `ranks` are the processes that compute the model, of which this is one.
    """

    model: str = DEFAULT_MODEL
    pool_bytes: int | None = None
    pool_blocks: int | None = None
    use_disk: bool = False
    store: Path | None = None
    disk_bytes: int | None = None
    disk_bytes_a_day: int | None = None
    disk_rated_bytes: int | None = None
    memory_bytes: int | None = None
    max_batch: int = 32
    process_bytes: int | None = None
    any_chip: bool = False
    fleet_secret: Path | None = None
    adapter: NamedAdapter | None = None
    weights_bytes: int | None = None
    remote: str | None = None
    remote_bytes: int | None = None
    ranks: PlacementPort | None = None

    @property
    def label(self) -> str:
        """What agents are saved with as their model; `load_tokenizer` takes it."""
        return self.model if self.adapter is None else self.adapter.named(self.model)

    @property
    def adapter_folder(self) -> Path | None:
        return None if self.adapter is None else self.adapter.folder
