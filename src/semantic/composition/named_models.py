"""Finds models and adapters by name, among aliases, folders and the hub."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from semantic.application.models.model_names import most_similar
from semantic.composition.engine_settings import ADAPTER_MARK, DEFAULT_MODEL, NamedAdapter, Settings
from semantic.composition.framework import mlx_provider
from semantic.composition.known_models import known_hub_id, known_models
from semantic.domain.errors import InvalidRequestError, ModelNotFoundError, OperatorError
from semantic.domain.value_objects import KvBits

if TYPE_CHECKING:
    from semantic.adapters.hub.remote import RemoteModel
    from semantic.adapters.mlx.model.description import ModelDescription
    from semantic.adapters.mlx.text.tokenizer import MLXTokenizer
    from semantic.ports.models import OnArrived


_ADAPTER_NAME = re.compile(r"[A-Za-z0-9][\w.-]{0,99}", re.ASCII)

_HUB_CACHE = "models--"
"""The beginning of the name of a model's folder in the hub's cache."""


def parse_adapter(given: str) -> tuple[str | None, NamedAdapter]:
    """Parse `[[BASE+]NAME=]PATH`. Return the name of the base model or None, and the adapter.
    Raises InvalidRequestError."""
    named, mark, path = given.partition("=")
    if not mark:
        named, path = model_path(given).name, given
    base, _, name = named.rpartition(ADAPTER_MARK)
    return base or None, named_adapter(name, path)


_KV_BITS: dict[str, KvBits] = {"8": 8, "int8": 8, "16": 16, "auto": 16}
_FEWER_BITS = {*map(str, range(1, 8)), "int4", "int2", "q4"}


def kv_bits_of(given: Sequence[str], names: Collection[str], known: Collection[str] = ()) -> KvBits:
    """Return what `[NAME=]BITS` in `given`, perhaps between commas, say of the model with these
    `names`. Other models have the names `known`. Raises InvalidRequestError."""
    by_name: dict[str, KvBits] = {}
    for one in filter(None, map(str.strip, ",".join(given).split(","))):
        name, _, bits = one.rpartition("=")
        if bits not in _KV_BITS:
            fewer = "; fewer bits than 8 change reasoning and tool calls" * (bits in _FEWER_BITS)
            raise InvalidRequestError(
                f"--kv-bits must be 8 or 16, or int8 or auto, got {bits[:100]!r}{fewer}"
            )
        if name and name not in {*names, *known}:
            all_names = ", ".join(dict.fromkeys((*names, *known)))
            raise InvalidRequestError(f"--kv-bits {one[:200]}: NAME must be one of {all_names}")
        by_name[name] = _KV_BITS[bits]
    return next((by_name[name] for name in (*names, "") if name in by_name), 16)


def named_adapter(name: str, path: str | Path) -> NamedAdapter:
    """Return the adapter in the folder `path`. Raises InvalidRequestError for an invalid name."""
    if not str(path) or not _ADAPTER_NAME.fullmatch(name):
        raise InvalidRequestError(
            f"adapter {name[:100]}={str(path)[:200]}: expected NAME=PATH, a name of letters, "
            "digits, dots, underscores and hyphens, and the folder of an adapter"
        )
    return NamedAdapter(name, Path(path).expanduser())


def model_name(model: str) -> str:
    """Return a model's name. The name of a folder is the last part of its path, or its hub id."""
    path = model_path(model)
    if not model.startswith(("/", "~", ".")) and not path.is_dir():
        return model
    name = path.name
    if path.parent.name == "snapshots" and path.parent.parent.name.startswith(_HUB_CACHE):
        name = path.parent.parent.name.removeprefix(_HUB_CACHE).replace("--", "/")
    return name if name and name.isprintable() else "model"


def model_path(model: str) -> Path:
    """Return the absolute path of `model` as a folder, without resolving links."""
    path = Path(model)
    with suppress(RuntimeError):  # without a known home folder
        path = path.expanduser()
    return path.resolve() if ".." in path.parts else path.absolute()


def model_of(name: str) -> str:
    """Return the model that `name` is an alias or a short name of. Any other name stays unchanged.
    Raises InvalidRequestError if the file of aliases is unreadable."""
    from semantic.adapters.hub.aliases import is_alias_name, read_aliases

    if name == DEFAULT_MODEL or not is_alias_name(name) or model_path(name).is_dir():
        return name
    return read_aliases().all().get(name) or known_hub_id(name) or name


def remember_served(model: str, names: Sequence[str]) -> None:
    """Make `names` aliases of `model`. The user's own aliases stay. Raises InvalidRequestError if
    the file of aliases is unreadable, and OperatorError if writing it fails."""
    from semantic.adapters.hub.aliases import is_alias_name, read_aliases, set_alias

    of_user = read_aliases().aliases if names else {}
    meant = permanent_name(model_of(model))
    for name in names:
        if is_alias_name(name) and name not in of_user and name not in (DEFAULT_MODEL, meant):
            set_alias(name, meant, "served")


def permanent_name(model: str) -> str:
    """Return `model` in a form for files. A folder becomes an absolute path."""
    path = model_path(model)
    return str(path) if model != DEFAULT_MODEL and path.is_dir() else model


@contextmanager
def suggesting(model: str) -> Iterator[None]:
    """Add the most similar model name to a ModelNotFoundError from the `with` block."""
    try:
        yield
    except ModelNotFoundError as error:
        alike = None if model_path(model).exists() else similar_model(model)
        if alike is None:
            raise
        raise ModelNotFoundError(f"{error}; did you mean {alike}?") from error


def similar_model(name: str) -> str | None:
    """Return the alias or model whose name is most similar to `name`, or None."""
    from semantic.adapters.hub.aliases import read_aliases
    from semantic.adapters.hub.hub_cache import cached_ids

    known = [DEFAULT_MODEL, *(one.name for one in known_models()), *cached_ids()]
    with suppress(InvalidRequestError):  # the file of aliases is unreadable
        known += read_aliases().all()
    return most_similar(name, known)


def load_tokenizer(model_id: str) -> MLXTokenizer:
    """Return a model's tokenizer without loading weights. Raises the same errors as `load`."""
    mlx_provider()
    from semantic.adapters.mlx.model.provider import load_tokenizer

    base, mark, adapter = model_id.rpartition(ADAPTER_MARK)
    is_label = mark and "/" not in adapter and not model_path(model_id).is_dir()
    model = model_of(base if is_label else model_id)
    with suggesting(model):
        return load_tokenizer(model)


def describe_model(
    folder: Path, weights_bytes: int | None = None, adapter: Path | None = None
) -> ModelDescription:
    """Return the memory needs of a model without loading weights. Raises the errors of
    `description.describe`, and OperatorError if MLX is not usable."""
    mlx_provider()
    from semantic.adapters.mlx.model.description import describe

    return describe(folder, weights_bytes, adapter)


def find_model(model: str) -> Path:
    """Return the folder of `model`. Downloads a missing model. Raises the same errors as `load`."""
    mlx_provider()
    from semantic.adapters.mlx.model.provider import find_folder

    with suggesting(model):
        return find_folder(model)


def file_states(settings: Settings) -> Mapping[str, object]:
    """Return the states of the files of a model and its adapter. A state changes with the file's
    content. Raises the same errors as `find_model`, and OSError."""
    from semantic.adapters.mlx.model.adapter import adapter_files
    from semantic.adapters.mlx.model.fingerprint import FileState
    from semantic.adapters.mlx.model.fingerprint import file_states as of_model

    folder = settings.adapter_folder
    own = () if folder is None else adapter_files(folder)
    return {**of_model(find_model(settings.model)), **{str(one): FileState.of(one) for one in own}}


def find_remote(hub_id: str) -> RemoteModel:
    """Return a model that is on the hub. Raises the same errors as `look_up`, and
    ModelNotFoundError for a model without weights."""
    from semantic.adapters.hub.remote import look_up
    from semantic.adapters.mlx.model.provider import HUB_FILES

    model = look_up(hub_id, HUB_FILES)
    if not model.weights_bytes:
        raise ModelNotFoundError(f"{hub_id!r} has no *.safetensors: it is not a model for MLX")
    return model


def fetch_model(
    model: RemoteModel, on_arrived: OnArrived, is_stopped: Callable[[], bool] = lambda: False
) -> None:
    """Download the missing files of `model`. Several threads call `on_arrived` with the progress.
    Raises the same errors as `download.pull`, and OperatorError once `is_stopped` returns True."""
    from semantic.adapters.hub import download
    from semantic.adapters.mlx.model.provider import HUB_FILES
    from semantic.ports.models import Arrived

    download.require_space(model)
    here, lock = model.n_bytes - download.missing_bytes(model), threading.Lock()
    on_arrived(Arrived(model.commit, here, model.n_bytes))

    def on_bytes(n_bytes: int) -> None:
        nonlocal here
        if is_stopped():
            raise OperatorError(f"the download of {model.hub_id} was stopped")
        with lock:
            here += n_bytes
            on_arrived(Arrived(model.commit, here, model.n_bytes))

    download.pull(model, HUB_FILES, on_bytes)


def own_names(model: str, given: str) -> tuple[str, ...]:
    """Return the name of `model`. If `given` is an alias of the model, also return `given`."""
    return (model_name(model), *(() if model == given else (given,)))
