"""What a client must know of a server that runs: its address, a model's name, the context.

Asks `/v1/models` as any client does. Goes through no proxy and follows no redirect: a key that is
sent reaches the named host alone.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from http import HTTPStatus
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from typing import Final
from urllib.parse import SplitResult, urlsplit

from semantic.domain.errors import (
    InvalidRequestError,
    ModelNotFoundError,
    OperatorError,
    OverloadedError,
)

DEFAULT_URL: Final = "http://127.0.0.1:8000"
KEY_VARIABLE: Final = "SEMANTIC_API_KEY"

_PATH: Final = "/v1/models"
_SECONDS: Final = 10.0
_LARGEST_ANSWER: Final = 1 << 20
_RETRY_SECONDS: Final = 5
_VARIABLE: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


@dataclass(frozen=True, slots=True)
class RunningServer:
    """A server that answered. `url` has no path; `key_variable` is None where no key is wanted.

    `model` is the name that requests use, and `context_tokens` what its prompt and answer may
    have together.
    """

    url: str
    model: str
    context_tokens: int
    key_variable: str | None = None


@dataclass(frozen=True, slots=True)
class _Answer:
    status: int
    body: bytes


def find_server(
    url: str, model: str | None = None, key_variable: str = KEY_VARIABLE
) -> RunningServer:
    """The server at `url`, with `model` or else the first that it names.

    A key is read from the environment variable `key_variable`, and sent only where the server
    refuses to answer without one. Raises InvalidRequestError for an address that cannot be one,
    OperatorError when nobody answers or something else does, OverloadedError while a model is
    loaded, ModelNotFoundError when the server has no model of that name.
    """
    address = _read_address(url)
    base = f"{address.scheme}://{address.netloc}"
    if not _VARIABLE.fullmatch(key_variable):
        raise InvalidRequestError(
            f"--key-variable: expected the name of an environment variable, got {key_variable!r}"
        )
    needed = None
    answer = _ask(address, base, None)
    if answer.status == HTTPStatus.UNAUTHORIZED:
        needed = key_variable
        answer = _ask(address, base, _key(base, key_variable))
    contexts = _read_models(base, needed, answer)
    if model is None:
        model = next(iter(contexts))
    if model not in contexts:
        known = ", ".join(contexts)
        raise ModelNotFoundError(f"{base} has no model {model!r:.100}; expected one of {known}")
    return RunningServer(base, model, contexts[model], needed)


def _read_address(url: str) -> SplitResult:
    try:
        address = urlsplit(url.strip())
        _ = address.port  # a number, or ValueError
    except ValueError as error:
        raise InvalidRequestError(f"--url: expected {DEFAULT_URL} or alike: {error}") from None
    plain = address.scheme in {"http", "https"} and address.hostname and url.strip().isprintable()
    rest = address.path.rstrip("/") in {"", "/v1"} and not (address.query or address.fragment)
    if not plain or not rest or "@" in address.netloc or " " in url.strip():
        # Not shown: it may hold a password.
        raise InvalidRequestError(
            f"--url: expected a scheme, a host and perhaps a port, such as {DEFAULT_URL}"
        )
    return address


def _key(base: str, variable: str) -> str:
    key = os.environ.get(variable, "").strip()
    if not key or not key.isascii() or not key.isprintable():
        raise OperatorError(
            f"{base} wants an API key: expected one in the environment variable {variable} "
            "(--key-variable names another)"
        )
    return key


def _ask(address: SplitResult, base: str, key: str | None) -> _Answer:
    host, port = address.hostname or "", address.port
    connect = HTTPSConnection if address.scheme == "https" else HTTPConnection
    connection = connect(host, port, timeout=_SECONDS)
    headers = {"Accept": "application/json", "Connection": "close"}
    if key is not None:
        headers["Authorization"] = f"Bearer {key}"
    try:
        connection.request("GET", _PATH, headers=headers)
        response = connection.getresponse()
        return _Answer(response.status, response.read(_LARGEST_ANSWER))
    except (OSError, HTTPException, UnicodeError) as error:
        told = getattr(error, "strerror", None) or str(error) or type(error).__name__
        raise OperatorError(
            f"no server answers at {base} ({told}); `semantic serve` starts one, --url names "
            "another"
        ) from None
    finally:
        connection.close()


def _read_models(base: str, key_variable: str | None, answer: _Answer) -> Mapping[str, int]:
    """Contexts by model name, the model's own name first."""
    if answer.status == HTTPStatus.SERVICE_UNAVAILABLE:
        raise OverloadedError(
            f"{base} is not ready: its model is being loaded; ask again in a moment",
            retry_after=_RETRY_SECONDS,
        )
    if answer.status in {HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN}:
        whose = f"the key in {key_variable}" if key_variable else "requests from here"
        raise OperatorError(f"{base} does not accept {whose}")
    contexts = _contexts(answer.body) if answer.status == HTTPStatus.OK else {}
    if not contexts:
        raise OperatorError(
            f"what answers at {base} is no server of ours: expected {_PATH} to name models with "
            f"max_model_len, got status {answer.status}"
        )
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
        # `type`, since True is an int too; a name ends up in files and in a shell.
        if isinstance(name, str) and name and name.isprintable() and type(tokens) is int:
            found[name] = tokens
    return {name: tokens for name, tokens in found.items() if tokens > 0}
