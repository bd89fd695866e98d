"""Coding agents that can use a server: how to configure and start them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from http import HTTPStatus
from pathlib import Path
from typing import Final

from semantic.domain.errors import (
    InvalidRequestError,
    ModelNotFoundError,
    OperatorError,
    OverloadedError,
)
from semantic_server.clients.config_file import JSON, TOML, FileFormat, Settings
from semantic_server.clients.server_connection import not_ours, read_address, read_key, send

_PATH: Final = "/v1/models"
_MAX_RESPONSE_BYTES: Final = 1 << 20
_RETRY_SECONDS: Final = 5
_VARIABLE: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


@dataclass(frozen=True, slots=True)
class RunningServer:
    """A running server. `key_variable` is None if the server requires no key. `context_tokens`
    limits a prompt plus its answer."""

    url: str
    model: str
    context_tokens: int
    key_variable: str | None = None


@dataclass(frozen=True, slots=True)
class _Response:
    status: int
    body: bytes


def find_server(
    url: str, model: str | None = None, key_variable: str = "SEMANTIC_API_KEY"
) -> RunningServer:
    """Return the server at `url`. If `model` is None, uses the server's first model. Raises
    InvalidRequestError, ModelNotFoundError, and OverloadedError while the model loads. Raises
    OperatorError for an unusable response."""
    address = read_address(url)
    base = f"{address.scheme}://{address.netloc}"
    if not _VARIABLE.fullmatch(key_variable):
        raise InvalidRequestError(
            f"--key-variable: expected the name of an environment variable, got {key_variable!r}"
        )
    needed = None
    response = _get_models(url, None)
    if response.status == HTTPStatus.UNAUTHORIZED:
        needed = key_variable
        response = _get_models(url, read_key(base, key_variable))
    contexts = _read_models(base, needed, response)
    if model is None:
        model = next(iter(contexts))
    if model not in contexts:
        known = ", ".join(contexts)
        raise ModelNotFoundError(f"{base} has no model {model!r:.100}; expected one of {known}")
    return RunningServer(base, model, contexts[model], needed)


def _get_models(url: str, key: str | None) -> _Response:
    with send(url, _PATH, key) as reply:
        return _Response(reply.status, reply.read(_MAX_RESPONSE_BYTES))


def _read_models(base: str, key_variable: str | None, response: _Response) -> Mapping[str, int]:
    if response.status == HTTPStatus.SERVICE_UNAVAILABLE:
        raise OverloadedError(
            f"{base} is not ready: its model is loading; try again in a moment",
            retry_after=_RETRY_SECONDS,
        )
    if response.status in {HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN}:
        denied = f"the key in {key_variable}" if key_variable else "requests from here"
        raise OperatorError(f"{base} does not accept {denied}")
    contexts = _contexts(response.body) if response.status == HTTPStatus.OK else {}
    if not contexts:
        names = f"{_PATH} to name models with max_model_len, got status {response.status}"
        raise not_ours(base, names)
    return contexts


def _contexts(body: bytes) -> dict[str, int]:
    try:
        document = json.loads(body)
    except (ValueError, RecursionError):
        return {}
    listed = document.get("data") if isinstance(document, dict) else None
    found: dict[str, int] = {}
    for entry in listed if isinstance(listed, list) else []:
        name, tokens = (
            (entry.get("id"), entry.get("max_model_len"))
            if isinstance(entry, dict)
            else (None, None)
        )
        # Not `isinstance`: True is an int too. `isprintable`: the name goes to files and a shell.
        if isinstance(name, str) and name and name.isprintable() and type(tokens) is int:
            found[name] = tokens
    return {name: tokens for name, tokens in found.items() if tokens > 0}


Environment = Mapping[str, str]

_PROVIDER: Final = "semantic"
"""The name under which an agent's settings list the server as a provider."""
_IDLE_MS: Final = 1_800_000
"""Milliseconds to wait for data of an answer. Claude Code accepts no larger value."""
_ANSWER_TOKENS: Final = 32_000
"""The maximum number of tokens in an answer."""


@dataclass(frozen=True, slots=True)
class Start:
    """A program to start, with arguments. The user's arguments follow `arguments`."""

    arguments: tuple[str, ...] = ()
    variables: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class CodingAgent:
    """A coding agent with its program, npm package and settings file. It works with a context of
    `least_tokens`. `settings_file` raises OperatorError if HOME is not an absolute path."""

    name: str
    package: str
    least_tokens: int
    format: FileFormat
    settings_file: Callable[[Environment], Path]
    settings: Callable[[RunningServer], Settings]
    start: Callable[[RunningServer, Environment], Start]


def _home(environment: Environment) -> Path:
    home = environment.get("HOME", "")
    if not Path(home).is_absolute():
        raise OperatorError("HOME must be an absolute path")
    return Path(home)


def _answer_tokens(server: RunningServer) -> int:
    return max(1, min(_ANSWER_TOKENS, server.context_tokens // 4))


# Claude Code: environment variables, in a shell or in the `env` block of its settings.

_NO_KEY: Final = "none"
"""A placeholder: Claude Code requires a login unless it has a token to send."""
_CLAUDE_MODELS: Final = (
    "ANTHROPIC_MODEL", "ANTHROPIC_DEFAULT_FABLE_MODEL", "ANTHROPIC_DEFAULT_OPUS_MODEL",
    "ANTHROPIC_DEFAULT_SONNET_MODEL", "ANTHROPIC_DEFAULT_HAIKU_MODEL",
    "CLAUDE_CODE_SUBAGENT_MODEL",
)  # fmt: skip
_LEAST_COMPACT_WINDOW: Final = 100_000
"""Claude Code raises a smaller window to this number of tokens."""
_REQUEST_MS: Final = 3_600_000


def _claude_file(environment: Environment) -> Path:
    own = environment.get("CLAUDE_CONFIG_DIR")
    return (Path(own) if own else _home(environment) / ".claude") / "settings.json"


def _claude_settings(server: RunningServer) -> Settings:
    variables: dict[str, str | None] = dict(_claude_variables(server))
    if server.key_variable is None:
        return {"env": {**variables, "ANTHROPIC_AUTH_TOKEN": _NO_KEY}}
    # A token in the block would take precedence over the command.
    return {
        "env": {**variables, "ANTHROPIC_AUTH_TOKEN": None},
        "apiKeyHelper": f'printf %s "${server.key_variable}"',
    }


def claude_exports(server: RunningServer) -> dict[str, str]:
    """Return Claude Code's environment variables. Values are quoted for a shell."""
    from shlex import quote

    words = {
        name: quote(value) for name, value in _claude_variables(server).items() if value is not None
    }
    token = _NO_KEY if server.key_variable is None else f'"${server.key_variable}"'
    return {**words, "ANTHROPIC_AUTH_TOKEN": token}


def _claude_variables(server: RunningServer) -> dict[str, str | None]:
    tokens = server.context_tokens
    window = str(tokens) if tokens >= _LEAST_COMPACT_WINDOW else None
    return {
        "ANTHROPIC_BASE_URL": server.url,
        # Empty, so that Claude Code does not send the user's Anthropic key to this server.
        "ANTHROPIC_API_KEY": "",
        **dict.fromkeys(_CLAUDE_MODELS, server.model),
        "CLAUDE_CODE_MAX_CONTEXT_TOKENS": str(tokens),
        "CLAUDE_CODE_AUTO_COMPACT_WINDOW": window,
        "CLAUDE_CODE_MAX_OUTPUT_TOKENS": str(_answer_tokens(server)),
        # Omit text that differs between sessions: at the prompt's start, it prevents cache hits.
        "CLAUDE_CODE_ATTRIBUTION_HEADER": "0",
        "CLAUDE_CODE_TOTAL_TOKENS_REMINDER": "off",
        "API_TIMEOUT_MS": str(_REQUEST_MS),
        "CLAUDE_STREAM_IDLE_TIMEOUT_MS": str(_IDLE_MS),
    }


def _claude_start(server: RunningServer, environment: Environment) -> Start:
    variables = {
        name: value for name, value in _claude_variables(server).items() if value is not None
    }
    token = _NO_KEY if server.key_variable is None else environment[server.key_variable].strip()
    return Start(variables={**variables, "ANTHROPIC_AUTH_TOKEN": token})


CLAUDE: Final = CodingAgent(
    "claude",
    "@anthropic-ai/claude-code",
    32_768,
    JSON,
    _claude_file,
    _claude_settings,
    _claude_start,
)


# Codex: a provider in its `config.toml`, and the model as its default.


def _codex_file(environment: Environment) -> Path:
    own = environment.get("CODEX_HOME")
    return (Path(own) if own else _home(environment) / ".codex") / "config.toml"


def _codex_settings(server: RunningServer) -> Settings:
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


def _codex_start(server: RunningServer, environment: Environment) -> Start:
    del environment
    settings = _leaves((), _codex_settings(server))
    pairs = ((".".join(path), json.dumps(value)) for path, value in settings if value is not None)
    return Start(tuple(word for name, value in pairs for word in ("-c", f"{name}={value}")))


def _leaves(
    path: tuple[str, ...], settings: Mapping[str, object]
) -> Iterator[tuple[Sequence[str], object]]:
    for name, value in settings.items():
        if isinstance(value, Mapping):
            yield from _leaves((*path, name), value)
        else:
            yield (*path, name), value


CODEX: Final = CodingAgent(
    "codex", "@openai/codex", 24_576, TOML, _codex_file, _codex_settings, _codex_start
)


# opencode: a provider in its `opencode.json`, and the model as its default.


def _opencode_file(environment: Environment) -> Path:
    own = environment.get("OPENCODE_CONFIG")
    if own:
        return Path(own)
    folder = environment.get("XDG_CONFIG_HOME")
    base = Path(folder) if folder else _home(environment) / ".config"
    return base / "opencode" / "opencode.json"


def _opencode_settings(server: RunningServer) -> Settings:
    key = None if server.key_variable is None else f"{{env:{server.key_variable}}}"
    limit = {"context": server.context_tokens, "output": _answer_tokens(server)}
    return {
        "model": f"{_PROVIDER}/{server.model}",
        "provider": {
            _PROVIDER: {
                "npm": "@ai-sdk/openai-compatible",
                "name": _PROVIDER,
                "options": {"baseURL": f"{server.url}/v1", "apiKey": key},
                "models": {server.model: {"name": server.model, "limit": limit}},
            }
        },
    }


def _opencode_start(server: RunningServer, environment: Environment) -> Start:
    """Pass opencode's settings in an environment variable, which overrides its settings files."""
    del environment
    settings = json.dumps(_set(_opencode_settings(server)))
    return Start(variables={"OPENCODE_CONFIG_CONTENT": settings})


def _set(settings: Mapping[str, object]) -> dict[str, object]:
    return {
        name: _set(value) if isinstance(value, Mapping) else value
        for name, value in settings.items()
        if value is not None
    }


OPENCODE: Final = CodingAgent(
    "opencode", "opencode-ai", 24_576, JSON, _opencode_file, _opencode_settings, _opencode_start
)

AGENTS: Final = {agent.name: agent for agent in (OPENCODE, CLAUDE, CODEX)}
