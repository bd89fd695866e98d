"""Codex: a provider in its `config.toml`, and the model as the one that it begins with."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Final

from semantic.adapters.clients.file_format import TOML
from semantic.adapters.clients.home import home_of
from semantic.adapters.clients.running_server import RunningServer
from semantic.adapters.clients.settings_tree import Settings

NAME: Final = "codex"
FORMAT: Final = TOML

_PROVIDER: Final = "semantic"
_IDLE_MS: Final = 1_800_000
"""A long prompt may take long the first time."""


def settings_file(environment: Mapping[str, str]) -> Path:
    """The user's settings: `config.toml` in CODEX_HOME, else in `~/.codex`."""
    own = environment.get("CODEX_HOME")
    return (Path(own) if own else home_of(environment) / ".codex") / "config.toml"


def settings(server: RunningServer) -> Settings:
    """What its settings must hold. A key stays in the user's variable: Codex reads it there."""
    return {
        "model": server.model,
        "model_provider": _PROVIDER,
        "model_context_window": server.context_tokens,
        "model_providers": {
            _PROVIDER: {
                "name": _PROVIDER,
                "base_url": f"{server.url}/v1",
                "wire_api": "responses",
                "env_key": server.key_variable,
                "stream_idle_timeout_ms": _IDLE_MS,
            }
        },
    }
