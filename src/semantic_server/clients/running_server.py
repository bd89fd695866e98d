"""A running server as a client sees it: its address, a model's name, the size of its context.

Read from `/v1/models`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from http import HTTPStatus
from typing import Final

from semantic.domain.errors import (
    InvalidRequestError,
    ModelNotFoundError,
    OperatorError,
    OverloadedError,
)
from semantic_server.clients.server_connection import (
    not_ours,
    read_address,
    read_key,
    send,
)

_PATH: Final = "/v1/models"
_MAX_RESPONSE_BYTES: Final = 1 << 20
_RETRY_SECONDS: Final = 5
_VARIABLE: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


@dataclass(frozen=True, slots=True)
class RunningServer:
    """A server. `url` has no path; `key_variable` is None if the server requires no key.

    `model` is the name that requests use; `context_tokens` limits prompt and answer together.
    """

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
    """The server at `url`, with `model` or else the first one listed.

    The key in the environment variable `key_variable` is sent only if a request without one is
    refused. Raises InvalidRequestError for a malformed address, OperatorError when there is no
    response or not one of this server's, OverloadedError while the model is loading, and
    ModelNotFoundError when the server has no model of that name.
    """
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
    """Context sizes by model name, the model's own name first."""
    if response.status == HTTPStatus.SERVICE_UNAVAILABLE:
        raise OverloadedError(
            f"{base} is not ready: its model is being loaded; try again in a moment",
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
        # `type`: True is an int too. `isprintable`: the name is written to files and to a shell.
        if isinstance(name, str) and name and name.isprintable() and type(tokens) is int:
            found[name] = tokens
    return {name: tokens for name, tokens in found.items() if tokens > 0}
