"""Facts about models that are not loaded: their files and their memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from semantic.cli.report import Json
from semantic.composition.engine_settings import DEFAULT_MODEL
from semantic.composition.framework import read_device
from semantic.composition.memory_shares import default_pool_bytes, default_process_bytes
from semantic.composition.named_models import describe_model, model_of, model_path
from semantic.domain.errors import InvalidRequestError, SemanticError
from semantic.domain.value_objects import BLOCK_TOKENS, ModelCacheSpec

if TYPE_CHECKING:
    from semantic.adapters.hub.hub_cache import CachedModel
    from semantic.adapters.hub.remote import RemoteModel
    from semantic.adapters.mlx.model.description import ModelDescription

AGENT_TOKENS = 32 * 1024
"""The length of an agent in tokens, to count how many agents fit."""

_WEIGHTS = "*.safetensors"

Source = Literal["package", "folder", "hub's cache", "hub"]


@dataclass(frozen=True, slots=True)
class Place:
    """The place and size of a model's files. `folder` is None for a model on the hub. `missing` is
    true if files are missing. `weights_bytes` is None if unknown."""

    name: str
    source: Source
    folder: Path | None
    n_bytes: int
    commit: str | None = None
    missing: bool = False
    weights_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class Capacity:
    """The bytes that a model needs, and the number of agents of 32k tokens that fit. Each token of
    an agent needs `token_bytes`, and each agent `fixed_bytes` in addition. `agents_8_bits` fit with
    caches of 8 bits; None if the model cannot have them."""

    token_bytes: int
    fixed_bytes: int
    agent_bytes: int
    weights_bytes: int
    memory_bytes: int
    pool_bytes: int
    agents: int
    agents_8_bits: int | None
    fits: bool


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """A model's place, kind and memory. `problem` says why some of these facts are missing."""

    place: Place
    aliases: tuple[str, ...] = ()
    description: ModelDescription | None = None
    capacity: Capacity | None = None
    problem: str | None = None

    def as_json(self) -> Json:
        place, found, capacity = self.place, self.description, self.capacity
        document: Json = {
            "name": place.name,
            "aliases": list(self.aliases),
            "source": place.source,
            "folder": None if place.folder is None else str(place.folder),
            "commit": place.commit,
            "bytes": place.n_bytes,
            "complete": not place.missing,
            "problem": self.problem,
        }
        if found is not None and capacity is not None:
            document |= {
                "model_type": found.model_type,
                "context_tokens": found.context_tokens,
                "caches": [asdict(form) for form in found.forms],
                **asdict(capacity),
                "agent_tokens": AGENT_TOKENS,
            }
        return document


def local_models(folders: Sequence[Path], pool_bytes: int | None) -> Iterator[ModelFacts]:
    """Yield facts of all models on this machine."""
    names = aliases_of_models()
    for place in _local_places(folders, names):
        yield facts_of(place, names, pool_bytes)


def facts_of(
    place: Place, aliases: Mapping[str, Sequence[str]], pool_bytes: int | None
) -> ModelFacts:
    """Return the facts about the model in `place`."""
    own = tuple(aliases.get(place.name, ()))
    if place.folder is None or (place.missing and place.weights_bytes is None):
        return ModelFacts(place, own, problem="its files are incomplete")
    return _described(place, own, place.folder, pool_bytes)


def remote_facts(model: RemoteModel, pool_bytes: int | None) -> ModelFacts:
    """Return the facts about a model on the hub. Raises the same errors as `look_up`."""
    from semantic.adapters.hub.remote import remote_config

    place = Place(model.hub_id, "hub", None, model.n_bytes, model.commit, True, model.weights_bytes)
    own = tuple(aliases_of_models().get(model.hub_id, ()))
    with remote_config(model) as folder:
        return _described(place, own, folder, pool_bytes)


def find_place(name: str) -> Place | None:
    """Return the place of a model's files. Returns None for a hub id outside the hub's cache.
    Raises ModelNotFoundError if `name` is neither a folder nor a hub id."""
    from semantic.adapters.mlx.model.provider import find_local

    model = model_of(name)
    folder = find_local(model)
    if folder is None:
        return next((_cached(one) for one in _cached_models() if one.hub_id == model), None)
    return _package(folder) if model == DEFAULT_MODEL else _folder(folder)


def hub_id_of(name: str) -> str:
    """Return the hub id for a hub id or an alias. Raises InvalidRequestError for other names."""
    model = model_of(name)
    if model == DEFAULT_MODEL or model_path(model).is_dir():
        raise InvalidRequestError(f"{model!r} is not a hub model: expected a hub id like org/name")
    if model.count("/") != 1 or model.startswith((".", "/", "~")):
        raise InvalidRequestError(f"{model!r} is not a hub id: expected one like org/name")
    return model


def aliases_of_models() -> dict[str, list[str]]:
    """Return the aliases of each model. Raises the same errors as `read_aliases`."""
    from semantic.adapters.hub.aliases import read_aliases

    names: dict[str, list[str]] = {}
    for alias, model in read_aliases().all().items():
        names.setdefault(model, []).append(alias)
    return names


def _local_places(folders: Sequence[Path], aliased: Iterable[str]) -> Iterator[Place]:
    from semantic.adapters.mlx.model.provider import find_local

    package = find_local(DEFAULT_MODEL)
    if package is not None:
        yield _package(package)
    yield from map(_cached, _cached_models())
    found = [path for name in aliased if (path := model_path(name)).is_dir()]
    for given in folders:
        if not given.is_dir():
            raise InvalidRequestError(f"{given} is not a folder")
        inside = [given, *sorted(given.iterdir())]
        found += [path.absolute() for path in inside if (path / "config.json").is_file()]
    yield from map(_folder, dict.fromkeys(found))


def _package(folder: Path) -> Place:
    return Place(DEFAULT_MODEL, "package", folder, _folder_bytes(folder))


def _folder(folder: Path) -> Place:
    return Place(str(model_path(str(folder))), "folder", folder, _folder_bytes(folder))


def _cached(model: CachedModel) -> Place:
    from semantic.adapters.hub.hub_cache import complete_folder, listed_sizes
    from semantic.adapters.mlx.model.provider import HUB_FILES

    whole = complete_folder(model.hub_id, HUB_FILES)
    n_bytes = model.n_bytes + model.unfinished_bytes
    if whole is not None and any(whole.glob(_WEIGHTS)):
        return Place(model.hub_id, "hub's cache", whole, n_bytes, model.commit)
    listed = listed_sizes(model, [_WEIGHTS])
    weights = None if listed is None else sum(listed.values())
    return Place(model.hub_id, "hub's cache", model.folder, n_bytes, model.commit, True, weights)


def _cached_models() -> tuple[CachedModel, ...]:
    from semantic.adapters.hub.hub_cache import cached_models

    return cached_models()


def _folder_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def _described(
    place: Place, aliases: tuple[str, ...], folder: Path, pool_bytes: int | None
) -> ModelFacts:
    try:
        description = describe_model(folder, place.weights_bytes)
    except SemanticError as error:
        return ModelFacts(place, aliases, problem=str(error))
    capacity = _capacity(description.spec, description.weights_bytes, pool_bytes)
    return ModelFacts(place, aliases, description, capacity)


def _capacity(spec: ModelCacheSpec, weights: int, pool_bytes: int | None) -> Capacity:
    from semantic.adapters.mlx.kv_cache.eight_bits import packed_spec

    memory = default_process_bytes(read_device(), weights)
    pool = default_pool_bytes(memory, weights) if pool_bytes is None else pool_bytes
    fits = weights + pool <= memory
    growing = [layer.bytes_per_block for layer in spec.layers if layer.max_blocks is None]
    block = sum(growing)
    agent, packed = spec.bytes_for(AGENT_TOKENS), packed_spec(spec)
    return Capacity(
        token_bytes=-(-block // BLOCK_TOKENS),
        fixed_bytes=agent - block * (AGENT_TOKENS // BLOCK_TOKENS),
        agent_bytes=agent,
        weights_bytes=weights,
        memory_bytes=memory,
        pool_bytes=pool,
        agents=pool // max(1, agent) if fits else 0,
        agents_8_bits=None if packed is None else pool // packed.bytes_for(AGENT_TOKENS) * fits,
        fits=fits,
    )
