"""Everything about a server that can be set: names, types, defaults and what is allowed.

Knows no flags, files or variables: see `sources`. Secrets never show their text.
"""

from __future__ import annotations

import ipaddress
from pathlib import Path
from typing import Annotated, Final, Literal, Self

from annotated_types import Ge, Gt, Le
from pydantic import SecretStr, field_validator, model_validator
from pydantic_settings import BaseSettings, NoDecode, PydanticBaseSettingsSource, SettingsConfigDict

Texts = Annotated[tuple[str, ...], NoDecode]
Paths = Annotated[tuple[Path, ...], NoDecode]
Secrets = Annotated[tuple[SecretStr, ...], NoDecode]
Seconds = Annotated[float, Gt(0), Le(86_400)]
Count = Annotated[int, Ge(1)]
Gib = Annotated[float, Gt(0), Le(1 << 20)]

_MIB: Final = 1 << 20
_KIB: Final = 1 << 10


class ServerSettings(BaseSettings):
    """A server's settings. Sizes are in the unit of their name: GiB, MiB, KiB; times in seconds.

    How tokens are chosen is as the model's makers recommend, where nothing is set.
    """

    model_config = SettingsConfigDict(
        env_prefix="SEMANTIC_", extra="forbid", frozen=True, hide_input_in_errors=True
    )

    host: str = "127.0.0.1"
    port: Annotated[int, Ge(0), Le(65_535)] = 8000
    allowed_hosts: Texts = ()
    allowed_origins: Texts = ()
    api_keys: Secrets = ()
    api_key_file: Path | None = None
    public_prefix: Paths = ()

    model: str = "semantic-tiny"
    served_model_name: Texts = ()
    max_model_len: Count | None = None
    pool_gb: Gib | None = None
    pool_blocks: Count | None = None
    store: Path | None = None
    no_store: bool = False
    disk_gb: Gib | None = None
    ram_gb: Gib | None = None
    max_batch: Count = 32
    max_waiting: Count = 256

    temperature: Annotated[float, Ge(0), Le(100)] | None = None
    top_p: Annotated[float, Ge(0), Le(1)] | None = None
    top_k: Annotated[int, Ge(0)] | None = None
    min_p: Annotated[float, Ge(0), Le(1)] | None = None
    max_tokens: Count | None = None
    force_usage: bool = False

    max_body_mb: Annotated[float, Gt(0), Le(4096)] = 16
    max_header_kb: Annotated[int, Ge(1), Le(1024)] = 64
    max_headers: Annotated[int, Ge(1), Le(10_000)] = 200
    max_connections: Count = 512
    header_timeout: Seconds = 10
    body_timeout: Seconds = 60
    idle_timeout: Annotated[int, Ge(1), Le(86_400)] = 75
    send_timeout: Seconds = 60
    keep_alive: Seconds = 10
    stop_timeout: Annotated[int, Ge(0), Le(86_400)] = 5

    log_format: Literal["text", "json"] = "text"
    log_level: Literal["debug", "info", "warning", "error"] = "info"

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Only what is given: `sources` reads the rest, and remembers from where."""
        del settings_cls, env_settings, dotenv_settings, file_secret_settings
        return (init_settings,)

    @field_validator(
        "allowed_hosts",
        "allowed_origins",
        "api_keys",
        "public_prefix",
        "served_model_name",
        mode="before",
    )
    @classmethod
    def _separated(cls, given: object) -> object:
        """A text stands for its parts between commas: what an environment variable can hold."""
        if isinstance(given, str):
            return tuple(part.strip() for part in given.split(",") if part.strip())
        return given

    @field_validator("api_keys", mode="before")
    @classmethod
    def _not_none(cls, given: object) -> object:
        """An empty text is no wish to go without keys: a variable was not filled in."""
        if isinstance(given, str) and not given.strip(" ,"):
            raise ValueError("expected at least one key")
        return given

    @field_validator("api_keys")
    @classmethod
    def _usable(cls, keys: tuple[SecretStr, ...]) -> tuple[SecretStr, ...]:
        for key in keys:
            text = key.get_secret_value()
            if not (text.isascii() and text.isprintable() and text.strip() == text and text):
                raise ValueError("expected printable ASCII characters without spaces around them")
        return keys

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.no_store and self.store is not None:
            raise ValueError("expected either store or no_store")
        return self

    @property
    def max_body_bytes(self) -> int:
        return int(self.max_body_mb * _MIB)

    @property
    def max_header_bytes(self) -> int:
        return self.max_header_kb * _KIB

    @property
    def is_local(self) -> bool:
        """Whether only this machine can reach the server."""
        return is_loopback(self.host)


def is_loopback(host: str) -> bool:
    """Whether `host` is a name or an address of this machine that no other can reach."""
    if host.rstrip(".").lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


SECRET_NAMES: Final = frozenset({"api_keys"})
"""Settings whose values are never shown."""
