"""The settings of an engine, and their command-line flags."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

from semantic.domain.value_objects import Drafts, ExactBatch, KvBits
from semantic.ports.ranks import PlacementPort

DEFAULT_MODEL = "semantic-tiny"
"""The name of the model inside the package."""

STORE_VARIABLE: Final = "SEMANTIC_STORE"
"""The environment variable with the path of the store's folder."""

ADAPTER_MARK = "+"
"""The text between the name of a model and its adapter's name."""


@dataclass(frozen=True, slots=True)
class NamedAdapter:
    """An adapter of a model, in `folder`. `name` becomes part of the model's name."""

    name: str
    folder: Path

    def named(self, base: str) -> str:
        """Return the name of the model `base` with this adapter."""
        return f"{base}{ADAPTER_MARK}{self.name}"


@dataclass(frozen=True, slots=True)
class Settings:
    """The settings of an engine to build."""

    model: str = DEFAULT_MODEL
    pool_bytes: int | None = None
    """The limit of the pool in bytes, if `pool_blocks` is None."""
    pool_blocks: int | None = None
    use_disk: bool = False
    """True for a disk tier in the folder `store`."""
    store: Path | None = None
    disk_bytes: int | None = None
    """The limit of the disk tier, in bytes."""
    disk_bytes_a_day: int | None = None
    """The bytes per day above which the disk tier writes only at ends of turns."""
    disk_rated_bytes: int | None = None
    """The number of bytes that the drive is rated to write."""
    memory_bytes: int | None = None
    """The limit of the store's memory tier, in bytes."""
    max_batch: int = 32
    """The maximum number of requests that decode in one step."""
    process_bytes: int | None = None
    """The limit on the memory of the process, in bytes."""
    exact_batch: ExactBatch = "auto"
    drafts: Drafts = "auto"
    kv_bits: KvBits = 16
    kv_bits_force: bool = False
    """True to use caches of 8 bits whatever they change."""
    any_chip: bool = False
    """True to share blocks with other kinds of chips."""
    fleet_secret: Path | None = None
    """The path of the file with the fleet's secret."""
    adapter: NamedAdapter | None = None
    weights_bytes: int | None = None
    """The limit on the weights of the model, in bytes."""
    remote: str | None = None
    """The URL of a fleet's object store, or None."""
    remote_bytes: int | None = None
    """The limit of the object store in bytes. This process enforces the limit."""
    ranks: PlacementPort | None = None
    """The processes that compute the model together."""

    @property
    def label(self) -> str:
        """The name of the model in manifests. `load_tokenizer` accepts the name."""
        return self.model if self.adapter is None else self.adapter.named(self.model)

    @property
    def adapter_folder(self) -> Path | None:
        return None if self.adapter is None else self.adapter.folder


class Flag:
    """The command-line flag of a setting. `names` are its spellings, by default the setting's name.
    `panel` is its heading in the help."""

    def __init__(
        self,
        panel: str,
        text: str,
        *names: str,
        metavar: str | None = None,
        completes_models: bool = False,
    ) -> None:
        self.panel, self.text, self.names = panel, text, names
        self.metavar, self.completes_models = metavar, completes_models


# Headings of the help, and texts that a server shares.
ENGINE: Final = "Model and memory"
STORE: Final = "Store"
TOP_P_HELP: Final = "Nucleus sampling; 1 is off, 0 always chooses the likeliest token."
TOP_K_HELP: Final = "Sample only from the k likeliest tokens; 0 is off."
MIN_P_HELP: Final = "Sample only tokens at least this likely, relative to the likeliest; 0 is off."

_MODEL_HELP: Final = (
    "A model folder, a hub id (org/name), an alias or the model inside the package."
)
MODEL: Final = Flag(ENGINE, _MODEL_HELP, completes_models=True)
MODELS: Final = Flag(
    ENGINE,
    f"{_MODEL_HELP} Repeatable: the first serves requests that name none.",
    completes_models=True,
)
ADAPTER: Final = Flag(
    ENGINE,
    "A folder with an adapter that mlx-lm trained for the model, which is then BASE+NAME "
    "with agents of its own.",
    "--adapter",
    "--adapter-path",
    metavar="[NAME=]PATH",
)
ADAPTERS: Final = Flag(
    ENGINE,
    "A folder with an adapter that mlx-lm trained, served as BASE+NAME on the weights of "
    "its base; with several models, BASE+NAME=PATH. Repeatable.",
    "--adapter",
    "--adapter-path",
    "--lora-modules",
    metavar="[NAME=]PATH",
)
POOL_GB: Final = Flag(
    ENGINE,
    "GiB for all agents' caches. Default: a quarter of the process' memory, at most what "
    "the weights leave.",
)
POOL_BLOCKS: Final = Flag(ENGINE, "Blocks of 256 tokens of one layer for all agents' caches.")
EXACT_BATCH: Final = Flag(
    ENGINE,
    "Give an answer the same bits alone and in any batch: on, off, or auto, if that makes a "
    "step of one request at most 1.05 times as long. Default: auto.",
)
DRAFTS: Final = Flag(
    ENGINE,
    "Draft tokens from earlier turns, so that a step may make several tokens of an answer: auto or "
    "off. Default: auto.",
)
KV_BITS: Final = Flag(
    ENGINE,
    "The bits of keys and values in caches: 8 (or int8), which halves a cache and rounds it, or 16 "
    "(or auto), the model's own. For one of several models, NAME=8; repeatable. Default: 16.",
    "--kv-bits",
    "--kv-cache-dtype",
    metavar="[NAME=]BITS",
)
KV_BITS_FORCE: Final = Flag(
    ENGINE,
    "Use caches of 8 bits even if they change a model's probabilities beyond the bounds that "
    "`semantic doctor --kv-bits 8` prints.",
    "--kv-bits-force",
)
STORE_FOLDER: Final = Flag(
    STORE,
    f"The folder of the store. Default: ${STORE_VARIABLE}, else one in the user's folder "
    "of caches.",
    "--store",
)
NO_STORE: Final = Flag(STORE, "Store nothing on disk: caches end with the program.", "--no-store")
DISK_GB: Final = Flag(
    STORE,
    "Quota of the store on disk, in GiB. Default: what it uses plus a tenth of the free "
    "space, at most 32.",
)
DISK_RATED_TBW: Final = Flag(
    STORE,
    "Terabytes that the store's drive is rated to write in its life (TBW), as its maker says: "
    "shows how much of that the store has used. Default: unknown.",
)
RAM_GB: Final = Flag(
    STORE,
    "GiB of memory for blocks saved or read recently, in addition to the pool. Default: "
    "a sixteenth of the process' memory.",
)
ANY_CHIP: Final = Flag(
    STORE,
    "Use blocks that other kinds of chips or BLAS kernels computed, which differ in "
    "their last bits: answers may differ from those of one machine alone.",
    "--share-across-chips",
)
FLEET_SECRET_FILE: Final = Flag(
    STORE,
    "A file with at least 32 random bytes, the same for every replica of a fleet: "
    "tenants' names in stores derive from it. Default: each store has its own.",
)
REMOTE_STORE: Final = Flag(
    STORE,
    "The object store that the replicas of a fleet share: s3://bucket/prefix, gs://, "
    "az:// or file://. Credentials come from the environment; needs "
    "semantic-engine[fleet] and --fleet-secret-file.",
    metavar="URL",
)
REMOTE_GB: Final = Flag(
    STORE,
    "GiB that the fleet may use in --remote-store: one of the processes with this "
    "option evicts the least recently used. Default: no limit.",
)
