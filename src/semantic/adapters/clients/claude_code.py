"""Claude Code: environment variables, in a shell or in the `env` block of its settings."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Final

from semantic.adapters.clients.file_format import JSON
from semantic.adapters.clients.home import home_of
from semantic.adapters.clients.running_server import RunningServer
from semantic.adapters.clients.settings_tree import Settings

NAME: Final = "claude"
FORMAT: Final = JSON

_NO_KEY: Final = "none"
"""Claude Code asks who is there unless it has something to send."""
_MODELS: Final = (
    "ANTHROPIC_MODEL", "ANTHROPIC_DEFAULT_FABLE_MODEL", "ANTHROPIC_DEFAULT_OPUS_MODEL",
    "ANTHROPIC_DEFAULT_SONNET_MODEL", "ANTHROPIC_DEFAULT_HAIKU_MODEL",
    "CLAUDE_CODE_SUBAGENT_MODEL",
)  # fmt: skip
_LONGEST_ANSWER: Final = 32_000
"""Tokens that Claude Code reserves for an answer of a model that it does not know."""
_SMALLEST_COMPACT_WINDOW: Final = 100_000
"""A smaller one is taken for this one, with a warning; the model's own limit holds anyway."""
_REQUEST_MS: Final = 3_600_000
_IDLE_MS: Final = 1_800_000
"""The longest that it accepts."""


def settings_file(environment: Mapping[str, str]) -> Path:
    """The user's settings: `settings.json` in CLAUDE_CONFIG_DIR, else in `~/.claude`."""
    own = environment.get("CLAUDE_CONFIG_DIR")
    return (Path(own) if own else home_of(environment) / ".claude") / "settings.json"


def settings(server: RunningServer) -> Settings:
    """What its settings must hold. A key is read from the user's own variable by a command."""
    variables: dict[str, str | None] = dict(_variables(server))
    if server.key_variable is None:
        return {"env": {**variables, "ANTHROPIC_AUTH_TOKEN": _NO_KEY}}
    # A token in the block would go before what the command says.
    return {
        "env": {**variables, "ANTHROPIC_AUTH_TOKEN": None},
        "apiKeyHelper": f'printf %s "${server.key_variable}"',
    }


def exports(server: RunningServer) -> dict[str, str]:
    """The same for a shell: variables whose values are shell words, quoted where they must be."""
    from shlex import quote

    words = {name: quote(value) for name, value in _variables(server).items() if value is not None}
    token = _NO_KEY if server.key_variable is None else f'"${server.key_variable}"'
    return {**words, "ANTHROPIC_AUTH_TOKEN": token}


def _variables(server: RunningServer) -> dict[str, str | None]:
    tokens = server.context_tokens
    window = str(tokens) if tokens >= _SMALLEST_COMPACT_WINDOW else None
    return {
        "ANTHROPIC_BASE_URL": server.url,
        # Empty: a key for Anthropic that the user has is not sent here.
        "ANTHROPIC_API_KEY": "",
        **dict.fromkeys(_MODELS, server.model),
        "CLAUDE_CODE_MAX_CONTEXT_TOKENS": str(tokens),
        "CLAUDE_CODE_AUTO_COMPACT_WINDOW": window,
        "CLAUDE_CODE_MAX_OUTPUT_TOKENS": str(max(1, min(_LONGEST_ANSWER, tokens // 4))),
        # Text that differs from session to session, and would part prompts at their start.
        "CLAUDE_CODE_ATTRIBUTION_HEADER": "0",
        "CLAUDE_CODE_TOTAL_TOKENS_REMINDER": "off",
        # A long prompt may take long the first time.
        "API_TIMEOUT_MS": str(_REQUEST_MS),
        "CLAUDE_STREAM_IDLE_TIMEOUT_MS": str(_IDLE_MS),
    }
