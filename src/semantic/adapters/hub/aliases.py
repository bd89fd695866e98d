"""Short names for models, in a TOML file next to the settings file.

    [aliases]                   set by the user with `semantic models alias`
    coder = "org/Coder-7B"
    [served]                    set by `semantic serve --served-model-name`
    gpt = "/models/other"

The user's names take precedence. The models need not exist.
"""

from __future__ import annotations

import fcntl
import os
import tempfile
import tomllib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal

import platformdirs

from semantic.domain.errors import InvalidRequestError, OperatorError

if TYPE_CHECKING:
    from tomlkit import TOMLDocument

Origin = Literal["aliases", "served"]
"""The name of a table in the file."""

_TABLES: Final[tuple[Origin, ...]] = ("aliases", "served")
_LARGEST_FILE: Final = 1 << 20
_LONGEST_NAME: Final = 200


@dataclass(frozen=True, slots=True)
class Aliases:
    """The models by alias, in one mapping for each table of the file."""

    aliases: Mapping[str, str] = field(default_factory=dict)
    served: Mapping[str, str] = field(default_factory=dict)

    def all(self) -> dict[str, str]:
        """Return the model of each alias, from both tables."""
        return {**self.served, **self.aliases}


def default_file() -> Path:
    """Return the path of `semantic/models.toml` in the user's settings folder."""
    return platformdirs.user_config_path("semantic") / "models.toml"


def is_alias_name(name: str) -> bool:
    """Return whether `name` can be an alias."""
    short = 0 < len(name) <= _LONGEST_NAME
    return short and name.isprintable() and "/" not in name and name[0] not in ".~- "


def read_aliases(file: Path | None = None) -> Aliases:
    """Return the aliases in `file`, by default `default_file()`. Raises InvalidRequestError if the
    file is unreadable or malformed."""
    path = file or default_file()
    found = _parse(path, _read_text(path))
    return Aliases(*(found[table] for table in _TABLES))


def set_alias(name: str, model: str, table: Origin = "aliases", file: Path | None = None) -> None:
    """Make `name` an alias of `model`. Raises InvalidRequestError for an invalid name or a
    malformed file, and OperatorError if the file is not writable."""
    if not is_alias_name(name):
        raise InvalidRequestError(
            f"an alias must be printable, contain no / and not begin with . ~ or -, got {name!r}"
        )
    path = file or default_file()

    def change(document: TOMLDocument) -> bool:
        known = document.setdefault(table, {})
        if known.get(name) == model:
            return False
        known[name] = model
        return True

    _change(path, change)


def remove_alias(name: str, file: Path | None = None) -> bool:
    """Remove an alias; return False for an unknown alias. Raises the same errors as `set_alias`."""

    def change(document: TOMLDocument) -> bool:
        tables = [document[table] for table in _TABLES if table in document]
        removed = [known.pop(name, None) for known in tables if isinstance(known, dict)]
        return any(model is not None for model in removed)

    return _change(file or default_file(), change)


def _change(path: Path, change: Callable[[TOMLDocument], bool]) -> bool:
    import tomlkit  # slow to import, and programs read names more often than they write them

    with _locked(path):
        text = _read_text(path)
        _parse(path, text)  # refuse a malformed file instead of replacing it
        document = tomlkit.parse(text)
        changed = change(document)
        if changed:
            _replace(path, tomlkit.dumps(document))
        return changed


def _parse(path: Path, text: str) -> dict[Origin, dict[str, str]]:
    try:
        found = tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidRequestError(f"{path} is not TOML: {error}") from error
    unknown = found.keys() - set(_TABLES)
    if unknown:
        raise InvalidRequestError(f"{path}: unknown table [{min(unknown)}], not aliases or served")
    tables: dict[Origin, dict[str, str]] = {}
    for table in _TABLES:
        names = found.get(table, {})
        if not isinstance(names, dict) or not all(isinstance(m, str) for m in names.values()):
            raise InvalidRequestError(f'{path}: [{table}] must have only lines like name = "model"')
        tables[table] = names
    return tables


def _read_text(path: Path) -> str:
    try:
        with path.open("rb") as file:
            data = file.read(_LARGEST_FILE + 1)
        if len(data) > _LARGEST_FILE:
            raise InvalidRequestError(f"{path} is longer than {_LARGEST_FILE} bytes")
        return data.decode()
    except FileNotFoundError:
        return ""
    except UnicodeDecodeError as error:
        raise InvalidRequestError(f"{path} is not UTF-8 text") from error
    except OSError as error:
        raise InvalidRequestError(f"cannot read {path}: {error.strerror}") from error


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Lock the folder of `path` for one program at a time."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        folder = os.open(path.parent, os.O_RDONLY)
    except OSError as error:
        raise OperatorError(f"cannot write {path}: {error.strerror}") from error
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        yield
    finally:
        os.close(folder)


def _replace(path: Path, text: str) -> None:
    # Atomic: a reader gets the old or the new content. Writes through a link.
    target = Path(os.path.realpath(path))
    try:
        descriptor, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
        try:
            with os.fdopen(descriptor, "w", encoding="utf-8") as file:
                file.write(text)
                file.flush()
                os.fsync(descriptor)
            Path(name).replace(target)
        finally:
            with suppress(FileNotFoundError):
                Path(name).unlink()
    except OSError as error:
        raise OperatorError(f"cannot write {path}: {error.strerror}") from error
