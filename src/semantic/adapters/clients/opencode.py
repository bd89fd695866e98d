"""opencode: a provider in its `opencode.json`, and the model as the one that it begins with."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Final

from semantic.adapters.clients.file_format import JSON
from semantic.adapters.clients.home import home_of
from semantic.adapters.clients.running_server import RunningServer
from semantic.adapters.clients.settings_tree import Settings

NAME: Final = "opencode"
FORMAT: Final = JSON

_PROVIDER: Final = "semantic"
_LONGEST_ANSWER: Final = 32_000
"""Tokens of an answer beyond which opencode does not go."""


def settings_file(environment: Mapping[str, str]) -> Path:
    """The user's settings: OPENCODE_CONFIG, else `opencode/opencode.json` in XDG_CONFIG_HOME,
    which is `~/.config` unless it is set."""
    own = environment.get("OPENCODE_CONFIG")
    if own:
        return Path(own)
    folder = environment.get("XDG_CONFIG_HOME")
    base = Path(folder) if folder else home_of(environment) / ".config"
    return base / "opencode" / "opencode.json"


def settings(server: RunningServer) -> Settings:
    """What its settings must hold. A key is read from the user's own variable."""
    key = None if server.key_variable is None else f"{{env:{server.key_variable}}}"
    tokens = server.context_tokens
    return {
        "model": f"{_PROVIDER}/{server.model}",
        "provider": {
            _PROVIDER: {
                "npm": "@ai-sdk/openai-compatible",
                "name": _PROVIDER,
                "options": {"baseURL": f"{server.url}/v1", "apiKey": key},
                "models": {
                    server.model: {
                        "name": server.model,
                        "limit": {
                            "context": tokens,
                            "output": max(1, min(_LONGEST_ANSWER, tokens // 4)),
                        },
                    }
                },
            }
        },
    }
