"""Where settings come from: a flag, else the environment, else a file, else the default.

Keeps the origin of every value. Knows no flags by name and prints nothing.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import platformdirs
from pydantic import SecretStr, ValidationError
from pydantic_settings import EnvSettingsSource

from semantic.adapters.http.settings import SECRET_NAMES, ServerSettings
from semantic.domain.errors import InvalidRequestError

_PREFIX: Final = "SEMANTIC_"
_ON: Final = frozenset({"true", "1", "yes", "on", "t", "y"})
_MASK: Final = "********"
_LARGEST_FILE: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class Loaded:
    """Settings, and for each by name where its value is from: "flag", "env NAME", "file PATH"
    or "default"."""

    settings: ServerSettings
    origins: Mapping[str, str]

    def shown(self) -> dict[str, object]:
        """Values as JSON can tell them; secrets are masked."""
        values: dict[str, object] = self.settings.model_dump(mode="json")
        for name in SECRET_NAMES:
            secrets: tuple[SecretStr, ...] = getattr(self.settings, name)
            values[name] = [_MASK] * len(secrets)
        return values


def default_file() -> Path:
    """Where the settings are that nobody named: `semantic/config.toml` in the user's folder."""
    return platformdirs.user_config_path("semantic") / "config.toml"


def load_settings(flags: Mapping[str, object], file: Path | None = None) -> Loaded:
    """The settings that `flags` (by field name), the environment and `file` give together.

    Without `file` the user's own is read, if there is one. Raises InvalidRequestError naming the
    setting, where it stands and what was expected.
    """
    path = default_file() if file is None else file
    environment = _given(EnvSettingsSource(ServerSettings)())
    in_file = _read_toml(path, must_exist=file is not None)
    origins = dict.fromkeys(ServerSettings.model_fields, "default")
    values: dict[str, object] = {}
    for layer, found in (
        (in_file, dict.fromkeys(in_file, f"file {path}")),
        (environment, {name: f"env {_PREFIX}{name.upper()}" for name in environment}),
        (flags, dict.fromkeys(flags, "flag")),
    ):
        for name in _opposites(layer):
            if values.pop(name, None) is not None:
                origins[name] = "default"
        values |= layer
        origins |= found
    try:
        settings = ServerSettings.model_validate(values)
    except ValidationError as error:
        raise InvalidRequestError(_first_problem(error, origins)) from error
    if settings.api_key_file is not None:
        given = () if origins["api_keys"] == "default" else (origins["api_keys"],)
        origins["api_keys"] = " and ".join((*given, f"file {settings.api_key_file}"))
    return Loaded(_with_keys_of_file(settings), origins)


def _given(environment: Mapping[str, object]) -> dict[str, object]:
    """Without variables that are empty, which count as not set; but an empty list of keys is a
    mistake that must not open a server."""
    return {
        name: value for name, value in environment.items() if value != "" or name in SECRET_NAMES
    }


def _opposites(layer: Mapping[str, object]) -> list[str]:
    """What a layer makes void in all below it: the store is on, or off."""
    void = ["no_store"] if "store" in layer else []
    return [*void, "store"] if str(layer.get("no_store", "")).lower() in _ON else void


def _read_toml(path: Path, *, must_exist: bool) -> dict[str, object]:
    try:
        text = _read_text(path)
    except FileNotFoundError as error:
        if must_exist:
            raise InvalidRequestError(f"cannot read {path}: there is no such file") from error
        return {}
    try:
        found = tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # also a number too long, lists too deep
        raise InvalidRequestError(f"{path} is no TOML: {error}") from error
    unknown = sorted(found.keys() - ServerSettings.model_fields.keys())
    if unknown:
        known = ", ".join(ServerSettings.model_fields)
        raise InvalidRequestError(
            f"{unknown[0]} (file {path}) is no setting; expected one of {known}"
        )
    return found


def _read_text(path: Path) -> str:
    """Raises InvalidRequestError for what cannot be read, and FileNotFoundError."""
    try:
        with path.open("rb") as file:
            data = file.read(_LARGEST_FILE + 1)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise InvalidRequestError(f"cannot read {path}: {error.strerror}") from error
    if len(data) > _LARGEST_FILE:
        raise InvalidRequestError(f"{path} is longer than {_LARGEST_FILE} bytes")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InvalidRequestError(f"{path} is no UTF-8 text") from error


def _with_keys_of_file(settings: ServerSettings) -> ServerSettings:
    """With the keys in `api_key_file` beside those given: one a line, `#` begins a remark."""
    path = settings.api_key_file
    if path is None:
        return settings
    try:
        lines = [line.strip() for line in _read_text(path).splitlines()]
    except FileNotFoundError as error:
        raise InvalidRequestError(
            f"api_key_file: cannot read {path}: there is no such file"
        ) from error
    keys = [line for line in lines if line and not line.startswith("#")]
    if not keys:
        raise InvalidRequestError(f"api_key_file: {path} has no key; expected one a line")
    together = (*settings.api_keys, *keys)
    try:
        return ServerSettings.model_validate(
            {**settings.model_dump(exclude_unset=True), "api_keys": together}
        )
    except ValidationError as error:
        raise InvalidRequestError(
            f"api_key_file: {path} has a key that cannot be one: "
            "expected printable ASCII characters"
        ) from error


def _first_problem(error: ValidationError, origins: Mapping[str, str]) -> str:
    """One line that names the setting, its origin and what was expected; never its value."""
    first = error.errors(include_url=False, include_input=False, include_context=False)[0]
    words = first["msg"].removeprefix("Value error, ")
    words = words.replace("Input should be", "expected")
    if not first["loc"]:
        return words
    name = str(first["loc"][0])
    return f"{name} ({origins.get(name, 'unknown')}): {words}"
