"""Changes a user's settings file in JSON or TOML, and keeps a backup."""

from __future__ import annotations

import json
import os
import re
import stat
import tempfile
import time
import tomllib
from collections.abc import Iterator, Mapping, MutableMapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol, TypeAlias

from semantic.domain.errors import InvalidRequestError, OperatorError

_OWNER_ONLY: Final = 0o600
_FOLDER: Final = 0o700
_MAX_BYTES: Final = 1 << 24


@dataclass(frozen=True, slots=True)
class Plan:
    """The text of a settings file before and after a change. `before` is None for a new file."""

    path: Path
    before: bytes | None
    after: bytes
    changes: tuple[Change, ...]


def plan(path: Path, kind: FileFormat, required: Settings) -> Plan:
    """Return the change that puts the `required` settings into a file, but write nothing. Raises
    UnreadableError for a text in another format, and OperatorError if the file is unreadable."""
    before = _read(path)
    try:
        text = "" if before is None else before.decode("utf-8-sig")
        needed = tuple(changes(kind.read(text), required))
        after = kind.change(text, required).encode() if needed else before or b""
    except UnicodeDecodeError as error:
        raise _unreadable(path, f"byte {error.start} is not UTF-8") from None
    except RecursionError:
        raise _unreadable(path, "it nests too deeply") from None
    except InvalidRequestError as error:
        raise _unreadable(path, str(error)) from None
    return Plan(path, before, after, needed)


def write(change: Plan) -> Path | None:
    """Write the new text atomically. Return the path of the backup, or None for a new file. Raises
    OperatorError if the write fails or the file has changed since `plan`."""
    if not change.changes:
        return None
    target = Path(os.path.realpath(change.path))
    with _os_errors(change.path, "written"):
        target.parent.mkdir(mode=_FOLDER, parents=True, exist_ok=True)
        mode = _OWNER_ONLY if change.before is None else stat.S_IMODE(target.stat().st_mode)
        copy = None if change.before is None else _backup(target, change.before, mode)
        _replace(target, change, mode)
    return copy


def _read(path: Path) -> bytes | None:
    with _os_errors(path, "read"):
        try:
            is_plain = stat.S_ISREG(path.stat().st_mode)
        except FileNotFoundError:
            return None
        if not is_plain:
            raise UnreadableError(f"{path} is not a file")
        data = path.read_bytes()
    if len(data) > _MAX_BYTES:
        raise UnreadableError(f"{path} has {len(data)} bytes: expected a file of settings")
    return data


def _unreadable(path: Path, why: str) -> UnreadableError:
    return UnreadableError(f"left {path} unchanged: {why}")


def _backup(target: Path, data: bytes, mode: int) -> Path:
    stamp = time.strftime("%Y%m%d-%H%M%S")
    number = 1
    while True:
        more = f"-{number}" if number > 1 else ""
        copy = target.with_name(f"{target.name}.{stamp}{more}.bak")
        try:
            descriptor = os.open(copy, os.O_WRONLY | os.O_CREAT | os.O_EXCL, _OWNER_ONLY)
        except FileExistsError:
            number += 1
            continue
        try:
            _write_all(descriptor, data, mode)
        except OSError:
            copy.unlink(missing_ok=True)
            raise
        return copy


def _replace(target: Path, change: Plan, mode: int) -> None:
    descriptor, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
    try:
        _write_all(descriptor, change.after, mode)
        if _read(target) != change.before:
            raise OperatorError(f"another program changed {target} meanwhile: try again")
        Path(name).replace(target)
    finally:
        with suppress(FileNotFoundError):
            Path(name).unlink()


def _write_all(descriptor: int, data: bytes, mode: int) -> None:
    with os.fdopen(descriptor, "wb") as file:
        os.fchmod(descriptor, mode)
        file.write(data)
        file.flush()
        os.fsync(descriptor)


@contextmanager
def _os_errors(path: Path, what: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if isinstance(error, OperatorError):
            raise
        raise OperatorError(f"{path} cannot be {what}: {error.strerror or error}") from None


Scalar: TypeAlias = str | int | bool
Settings: TypeAlias = Mapping[str, "Scalar | Settings | None"]
"""Required settings, as nested tables. None means that the setting must be absent."""
Document: TypeAlias = dict[str, object]
"""The settings in a file, as nested tables."""

MASK: Final = "********"
_SECRET: Final = frozenset({"ANTHROPIC_API_KEY", "ANTHROPIC_AUTH_TOKEN", "apiKey", "apiKeyHelper"})

_INDENT: Final = re.compile(r'\n([ \t]+)"')
_SURROGATE: Final = re.compile("[\ud800-\udfff]")


@dataclass(frozen=True, slots=True)
class Change:
    """A setting's old and new value. None means that the setting is absent."""

    path: tuple[str, ...]
    was: object
    becomes: Scalar | None

    @property
    def shown_was(self) -> object:
        """The old value, masked if it may contain a key or a password."""
        if self.was is None or isinstance(self.was, bool | int | float):
            return self.was
        if not isinstance(self.was, str) or self.path[-1] in _SECRET or "@" in self.was:
            return MASK
        return self.was


def changes(document: Mapping[str, object], required: Settings) -> list[Change]:
    """Return the changes that give `document` the `required` settings. Raises InvalidRequestError
    if `document` has a plain value where `required` has a table."""
    return list(_changes(document, required, ()))


def _changes(
    document: Mapping[str, object], required: Settings, path: tuple[str, ...]
) -> Iterator[Change]:
    for name, value in required.items():
        here = (*path, name)
        was = document.get(name)
        if isinstance(value, Mapping):
            if was is not None and not isinstance(was, Mapping):
                raise InvalidRequestError(
                    f"{'.'.join(here)} must be a table of settings, got {type(was).__name__}"
                )
            yield from _changes(was or {}, value, here)
        elif was != value or type(was) is not type(value):
            yield Change(here, was, value)


def applied(document: Mapping[str, object], required: Settings) -> Document:
    """Return a copy of `document` with the `required` settings."""
    result = dict(document)
    for name, value in required.items():
        if isinstance(value, Mapping):
            was = result.get(name)
            below = applied(was if isinstance(was, Mapping) else {}, value)
            if below or name in result:
                result[name] = below
        elif value is None:
            result.pop(name, None)
        else:
            result[name] = value
    return result


class UnreadableError(InvalidRequestError):
    """The text of a settings file is not in the expected format."""


class FileFormat(Protocol):
    """A format of settings files. Methods raise UnreadableError for a text of another form."""

    def read(self, text: str) -> Document:
        """Parse the text of a settings file."""

    def change(self, text: str, required: Settings) -> str:
        """Return `text` with the `required` settings."""


class Json:
    """Standard JSON, without comments."""

    def read(self, text: str) -> Document:
        """Parse the text of a settings file. Raises UnreadableError for a repeated name."""
        if not text.strip():
            return {}
        try:
            document: object = json.loads(
                text, object_pairs_hook=_without_doubles, parse_constant=_refuse_constant
            )
        except UnreadableError:
            raise
        except ValueError as error:
            raise UnreadableError(f"expected JSON without comments: {error}") from None
        if not isinstance(document, dict):
            raise UnreadableError(f"expected a JSON object, got {type(document).__name__}")
        return document

    def change(self, text: str, required: Settings) -> str:
        """Return `text` with the `required` settings. The indentation stays the same."""
        document = applied(self.read(text), required)
        found = _INDENT.search(text)
        try:
            written = json.dumps(
                document, indent=found[1] if found else 2, ensure_ascii=False, allow_nan=False
            )
        except ValueError:
            raise UnreadableError("it contains a number that is too large to preserve") from None
        written = _SURROGATE.sub(lambda half: f"\\u{ord(half[0]):04x}", written)
        return _checked(self, written + "\n", document)


class Toml:
    """TOML. A change keeps comments and layout."""

    def read(self, text: str) -> Document:
        try:
            return tomllib.loads(text)
        except ValueError as error:
            raise UnreadableError(f"expected TOML: {error}") from None

    def change(self, text: str, required: Settings) -> str:
        import tomlkit
        from tomlkit.exceptions import TOMLKitError

        expected = applied(self.read(text), required)
        try:
            document = tomlkit.parse(text)
            _put(document, required)
            written = tomlkit.dumps(document)
        except (TOMLKitError, ValueError) as error:
            raise UnreadableError(f"cannot keep its layout: {error}") from None
        return _checked(self, written, expected)


JSON: Final = Json()
TOML: Final = Toml()


def _put(table: MutableMapping[str, object], required: Settings) -> None:
    for name, value in required.items():
        if value is None:
            table.pop(name, None)
        elif not isinstance(value, Mapping):
            if name not in table or table[name] != value:
                table[name] = value
        else:
            below = table.get(name)
            if isinstance(below, MutableMapping):
                _put(below, value)
            else:
                new = _new_table(table, value)
                _put(new, value)
                table[name] = new


def _new_table(around: object, required: Settings) -> MutableMapping[str, object]:
    import tomlkit
    from tomlkit.items import InlineTable

    if isinstance(around, InlineTable):
        return tomlkit.inline_table()
    # A table that contains only tables gets no heading.
    are_tables = (isinstance(value, Mapping) for value in required.values())
    return tomlkit.table(is_super_table=all(are_tables))


def _checked(kind: FileFormat, written: str, expected: Document) -> str:
    if _canonical(kind.read(written)) != _canonical(expected):
        raise UnreadableError("with this layout, the change would lose other settings")
    return written


def _canonical(document: Document) -> str:
    return json.dumps(document, sort_keys=True, default=repr)


def _without_doubles(pairs: list[tuple[str, object]]) -> Document:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        double = next(name for name in names if names.count(name) > 1)
        raise UnreadableError(f"{double!r:.80} occurs twice in one object")
    return found


def _refuse_constant(name: str) -> object:
    raise UnreadableError(f"{name} is not JSON")
