"""Validates a server's settings from flags, environment and file. Errors never show secrets."""

from __future__ import annotations

import ipaddress
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Self

import platformdirs
from pydantic import SecretStr, ValidationError, field_serializer, field_validator, model_validator
from pydantic_settings import (
    BaseSettings,
    EnvSettingsSource,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
)

from semantic.application.models.model_names import most_similar
from semantic.domain.errors import InvalidRequestError
from semantic_server.declared_settings import DeclaredSettings

_MIB: Final = 1 << 20
_KIB: Final = 1 << 10


class ServerSettings(BaseSettings, DeclaredSettings):
    """A server's settings, validated."""

    model_config = SettingsConfigDict(
        env_prefix="SEMANTIC_",
        enable_decoding=False,
        extra="forbid",
        frozen=True,
        hide_input_in_errors=True,
    )

    api_keys: tuple[SecretStr, ...] = ()
    operator_keys: tuple[SecretStr, ...] = ()

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Return only the explicit values, because `load_settings` reads the other sources."""
        del settings_cls, env_settings, dotenv_settings, file_secret_settings
        return (init_settings,)

    @field_validator(
        "allowed_hosts",
        "allowed_origins",
        "api_keys",
        "operator_keys",
        "public_prefix",
        "served_model_name",
        "allowed_models",
        "adapters",
        "kept_models",
        "allow_pull",
        mode="before",
    )
    @classmethod
    def _split_commas(cls, given: object) -> object:
        """Split a text at commas, because an environment variable contains a list as text."""
        if isinstance(given, str):
            return tuple(part.strip() for part in given.split(",") if part.strip())
        return given

    @field_validator("model", "kv_bits", mode="before")
    @classmethod
    def _several_models(cls, given: object) -> object:
        """Take a text as one model, because a folder's name may contain commas, or one setting."""
        return (str(given),) if isinstance(given, str | int) else given

    @field_serializer("model")
    def _one_model(self, models: tuple[str, ...]) -> object:
        return models[0] if len(models) == 1 else models

    @field_validator("api_keys", "operator_keys", mode="before")
    @classmethod
    def _require_key(cls, given: object) -> object:
        """Reject an empty key. Otherwise an empty variable would open the server to all."""
        if isinstance(given, str) and not given.strip(" ,"):
            raise ValueError("expected at least one key")
        return given

    @field_validator("api_keys", "operator_keys")
    @classmethod
    def _check_keys(cls, keys: tuple[SecretStr, ...]) -> tuple[SecretStr, ...]:
        for key in keys:
            text = key.get_secret_value()
            if not (text.isascii() and text.isprintable() and text.strip() == text and text):
                raise ValueError("expected printable ASCII characters without spaces around them")
        return keys

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.no_store and self.store is not None:
            raise ValueError("expected at most one of store and no_store")
        if self.kv_events is not None and self.has_managed_models:
            raise ValueError("kv_events: expected one model that stays loaded")
        if self.any_model_name and (self.has_several_models or self.embedding_model is not None):
            raise ValueError(
                "any_model_name must be false with several models, adapters or embeddings"
            )
        return self

    @property
    def has_several_models(self) -> bool:
        return bool(self.model[1:] or self.allowed_models or self.adapters or self.allow_pull)

    @property
    def has_managed_models(self) -> bool:
        """True if models load and unload while the server runs."""
        has_budget = self.models_gb is not None or self.model_ttl is not None
        return self.has_several_models or bool(self.kept_models) or has_budget

    @property
    def max_body_bytes(self) -> int:
        return int(self.max_body_mb * _MIB)

    @property
    def max_header_bytes(self) -> int:
        return self.max_header_kb * _KIB

    @property
    def is_local(self) -> bool:
        """True if only this machine can reach the server."""
        return is_loopback(self.host)


def is_loopback(host: str) -> bool:
    """Return whether `host` is a loopback name or address."""
    if host.rstrip(".").lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


KEY_FILES: Final = {"api_keys": "api_key_file", "operator_keys": "operator_key_file"}
"""For each setting of keys, the setting that names a file with more keys."""
SECRET_NAMES: Final = frozenset(KEY_FILES)
"""Settings whose values must never appear in any output."""


_PREFIX: Final = "SEMANTIC_"
_TRUE: Final = frozenset({"true", "1", "yes", "on", "t", "y"})
_MASK: Final = "********"
_SECRET_IN_URL: Final = re.compile(r"(?<=://)[^/]+(?=@)|(?<==)[^&]+")
_LARGEST_FILE: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class LoadedSettings:
    """Settings, and the origin of each: "flag", "env NAME", "file PATH" or "default"."""

    settings: ServerSettings
    origins: Mapping[str, str]
    file: Path

    def as_json(self) -> dict[str, object]:
        """Return the values as JSON, with secrets masked."""
        values: dict[str, object] = self.settings.model_dump(mode="json")
        if self.settings.remote_store is not None:
            values["remote_store"] = _SECRET_IN_URL.sub(_MASK, self.settings.remote_store)
        for name in SECRET_NAMES:
            secrets: tuple[SecretStr, ...] = getattr(self.settings, name)
            values[name] = [_MASK] * len(secrets)
        return values


def default_file() -> Path:
    """Return the path of the user's default settings file, `semantic/config.toml`."""
    return platformdirs.user_config_path("semantic") / "config.toml"


def load_settings(flags: Mapping[str, object], file: Path | None = None) -> LoadedSettings:
    """Load settings. Flags override the environment, the environment overrides the file, and the
    file overrides the defaults.

    Without `file`, reads the user's default file if it exists. An InvalidRequestError names the
    invalid setting and the setting's origin.
    """
    path = default_file() if file is None else file
    environment = _without_empty(EnvSettingsSource(ServerSettings)())
    in_file = _read_toml(path, must_exist=file is not None)
    origins = dict.fromkeys(ServerSettings.model_fields, "default")
    values: dict[str, object] = {}
    for layer, found in (
        (in_file, dict.fromkeys(in_file, f"file {path}")),
        (environment, {name: f"env {_PREFIX}{name.upper()}" for name in environment}),
        (flags, dict.fromkeys(flags, "flag")),
    ):
        for name in _overridden(layer):
            if values.pop(name, None) is not None:
                origins[name] = "default"
        values |= layer
        origins |= found
    try:
        settings = ServerSettings.model_validate(values)
    except ValidationError as error:
        raise InvalidRequestError(_first_problem(error, origins)) from error
    for name, file_name in KEY_FILES.items():
        path_of_keys: Path | None = getattr(settings, file_name)
        if path_of_keys is not None:
            settings = _with_keys_of_file(settings, name, path_of_keys)
            given = () if origins[name] == "default" else (origins[name],)
            origins[name] = " and ".join((*given, f"file {path_of_keys}"))
    _require_operators_apart(settings)
    _require_one_tenant_for_events(settings)
    return LoadedSettings(settings, origins, path)


def _require_one_tenant_for_events(settings: ServerSettings) -> None:
    """Refuse `kv_events` with several tenants, because the events reveal prompts."""
    if settings.kv_events is not None and len(settings.api_keys) > 1:
        raise InvalidRequestError("kv_events: expected at most one API key: events show prompts")


def _require_operators_apart(settings: ServerSettings) -> None:
    """Refuse operators' keys without tenants' keys, because any request would be allowed."""
    if settings.operator_keys and not settings.api_keys:
        raise InvalidRequestError("operator_keys: expected api_keys too, got none")
    if {*settings.operator_keys} & {*settings.api_keys}:
        raise InvalidRequestError("operator_keys: expected keys that are not in api_keys")


def _without_empty(environment: Mapping[str, object]) -> dict[str, object]:
    """Drop empty variables. An empty list of keys stays: its validation then fails."""
    return {
        name: value for name, value in environment.items() if value != "" or name in SECRET_NAMES
    }


def _overridden(layer: Mapping[str, object]) -> list[str]:
    void = ["no_store"] if "store" in layer else []
    return [*void, "store"] if str(layer.get("no_store", "")).lower() in _TRUE else void


def _read_toml(path: Path, *, must_exist: bool) -> dict[str, object]:
    try:
        text = _read_text(path)
    except FileNotFoundError as error:
        if must_exist:
            raise InvalidRequestError(f"cannot read {path}: file not found") from error
        return {}
    try:
        found = tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # RecursionError: nesting too deep
        raise InvalidRequestError(f"{path} is not valid TOML: {error}") from error
    unknown = sorted(found.keys() - ServerSettings.model_fields.keys())
    if unknown:
        alike = most_similar(unknown[0], ServerSettings.model_fields)
        hint = f"did you mean {alike}?" if alike else "`semantic config show` lists them all"
        raise InvalidRequestError(f"{unknown[0]} (file {path}) is not a setting; {hint}")
    return found


def _read_text(path: Path) -> str:
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
        raise InvalidRequestError(f"{path} is not UTF-8 text") from error


def _with_keys_of_file(settings: ServerSettings, name: str, path: Path) -> ServerSettings:
    file_name, given = KEY_FILES[name], getattr(settings, name)
    try:
        lines = [line.strip() for line in _read_text(path).splitlines()]
    except FileNotFoundError as error:
        raise InvalidRequestError(f"{file_name}: cannot read {path}: file not found") from error
    keys = [line for line in lines if line and not line.startswith("#")]
    if not keys:
        raise InvalidRequestError(f"{file_name}: {path} has no key; expected one per line")
    try:
        return ServerSettings.model_validate(
            {**settings.model_dump(exclude_unset=True), name: (*given, *keys)}
        )
    except ValidationError as error:
        raise InvalidRequestError(
            f"{file_name}: {path} has an invalid key: expected printable ASCII characters"
        ) from error


def _first_problem(error: ValidationError, origins: Mapping[str, str]) -> str:
    """Return the first problem of `error`. Omits the setting's value, which may be a secret."""
    first = error.errors(include_url=False, include_input=False, include_context=False)[0]
    message = first["msg"].removeprefix("Value error, ")
    message = message.replace("Input should be", "expected")
    if not first["loc"]:
        return message
    name = str(first["loc"][0])
    return f"{name} ({origins.get(name, 'unknown')}): {message}"
