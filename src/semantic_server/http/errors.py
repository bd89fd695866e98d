"""Error responses. Each API has its own form of an error. Only the log contains the details of an
unexpected error."""

from __future__ import annotations

import errno
import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from http import HTTPStatus
from typing import Final

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, Response
from starlette.routing import Match
from starlette.types import Scope

from semantic.domain.answer import AnswerEnd
from semantic.domain.errors import (
    GRAMMAR_FAILED,
    NOT_FINITE,
    AgentNotFoundError,
    CapacityError,
    ContextOverflowError,
    InvalidRequestError,
    ModelLoadError,
    ModelNotFoundError,
    OverloadedError,
    PinLimitError,
    RequestError,
    TenantLimitError,
)

logger = logging.getLogger("semantic.server")

RETRY_SECONDS: Final = 5
"""Default Retry-After in seconds."""

_ANTHROPIC_PATHS: Final = "/v1/messages"
_OLLAMA_PATHS: Final = "/api"
_LM_STUDIO_PATHS: Final = "/api/v0"
_INTERNAL: Final = "internal error; the server's log has the details under this request's id"

CANCELLED: Final = 499
"""nginx's status for a closed request. Clients do not repeat a request after this status."""

_METHODS: Final = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS")

_NOT_TO_BE_REPEATED: Final = frozenset({500, CANCELLED})
"""Statuses after which SDKs must not repeat a request."""

_CLOSING: Final = frozenset({408, 431, 505})
"""Statuses after which the server closes the connection."""

_ANTHROPIC_TYPES: Final = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    421: "permission_error",
    429: "rate_limit_error",
    503: "overloaded_error",
}


class WireError(Exception):
    """An error response that the HTTP layer itself raises."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code
        self.retry_after = retry_after


class TooLargeError(WireError):
    """The request body exceeds a limit."""

    def __init__(self, message: str) -> None:
        super().__init__(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, message, code="request_too_large")


def check_finished(end: AnswerEnd) -> None:
    """Raise the error of `failure_of`, if there is one."""
    failure = failure_of(end)
    if failure is None:
        return
    if failure.status == HTTPStatus.INTERNAL_SERVER_ERROR:
        logger.error("answer failed: %s", end.error)
    raise failure


def failure_of(end: AnswerEnd) -> WireError | None:
    """Return an error unless the answer is complete or reached `max_tokens`. The error's message
    omits details of the machine."""
    if end.reason == "cancelled":
        return WireError(CANCELLED, "the request was cancelled", code="cancelled")
    if end.reason != "error":
        return None
    if (end.error or "").startswith(GRAMMAR_FAILED):
        said = f"{end.error}; simplify the schema or grammar"
        return WireError(HTTPStatus.BAD_REQUEST, said, code="grammar_failed")
    known = f": {end.error}" if end.error == NOT_FINITE else ""
    message = f"the model failed during the answer{known}"
    return WireError(HTTPStatus.INTERNAL_SERVER_ERROR, message, code="answer_failed")


class ClientDisconnectedError(Exception):
    """The client disconnected before its response was complete."""


class FieldError(InvalidRequestError):
    """A field of the body is invalid. `param` is its path, as in `messages[0].content`."""

    def __init__(self, message: str, *, param: str) -> None:
        super().__init__(message)
        self.param = param

    def at(self, path: str) -> FieldError:
        """Return the same error with `path` as its `param`."""
        return FieldError(f"{path}: {str(self).removeprefix(f'{self.param}: ')}", param=path)


@dataclass(frozen=True, slots=True)
class Problem:
    """An error as a client sees it. For a context overflow, `tokens` is (requested, limit). If
    `closes` is true, the connection closes after the response."""

    status: int
    message: str
    param: str | None = None
    code: str | None = None
    retry_after: int | None = None
    tokens: tuple[int, int] | None = None
    closes: bool = False


def problem_of(error: BaseException) -> Problem:
    """Return the problem to report for `error`. All unexpected errors have the same text."""
    match error:
        case WireError():
            found = Problem(error.status, str(error), error.param, error.code, error.retry_after)
        case HTTPException():
            found = Problem(error.status_code, error.detail)
        case RequestValidationError():
            found = _wrong_parameter(error)
        case RequestError():
            found = _wrong_request(error)
        case TenantLimitError():
            code = "rate_limit_exceeded"
            found = Problem(429, str(error), code=code, retry_after=error.retry_after)
        case OSError(errno=errno.EMFILE | errno.ENFILE):
            message = "too many files are open"
            found = Problem(503, message, code="overloaded", retry_after=RETRY_SECONDS)
        case ModelLoadError():
            code = "model_unavailable"
            found = Problem(503, error.public, "model", code, retry_after=RETRY_SECONDS)
        case CapacityError():
            later = error.retry_after if isinstance(error, OverloadedError) else RETRY_SECONDS
            found = Problem(503, str(error), code="overloaded", retry_after=later)
        case _:
            found = Problem(500, _INTERNAL, code="internal_error")
    return found


def _wrong_request(error: RequestError) -> Problem:
    match error:
        case ContextOverflowError():
            tokens = (error.prompt_tokens, error.limit)
            code = "context_length_exceeded"
            param = "messages" if error.is_chat else "prompt"
            return Problem(400, str(error), param, code, tokens=tokens)
        case AgentNotFoundError():
            return Problem(404, str(error), code="agent_not_found")
        case PinLimitError():
            return Problem(403, str(error), "pinned", "pin_limit_exceeded")
        case ModelNotFoundError():
            return Problem(404, str(error), "model", "model_not_found")
        case FieldError():
            return Problem(400, str(error), error.param)
        case _:
            return Problem(400, str(error))


def _wrong_parameter(error: RequestValidationError) -> Problem:
    first = error.errors()[0]
    param = ".".join(str(part) for part in first["loc"][1:])
    return Problem(400, f"{param}: {first['msg']}", param)


def openai_error(problem: Problem) -> dict[str, object]:
    """Return the error body of OpenAI's API."""
    message = problem.message
    if problem.tokens is not None:
        # Clients that truncate their history match the first words of this message.
        message = "This model's maximum context length is {1} tokens; the prompt has {0}".format(
            *problem.tokens
        )
    kind = "server_error" if _is_ours(problem) else "invalid_request_error"
    said = {"message": message, "type": kind, "param": problem.param, "code": problem.code}
    return {"error": said}


def anthropic_error(problem: Problem, request_id: str | None = None) -> dict[str, object]:
    """Return the error body of Anthropic's API."""
    message = problem.message
    if problem.tokens is not None:
        # Clients parse both numbers out of exactly this text, and compact their history.
        message = "prompt is too long: {} tokens > {} maximum".format(*problem.tokens)
    fallback = "api_error" if _is_ours(problem) else "invalid_request_error"
    kind = _ANTHROPIC_TYPES.get(problem.status, fallback)
    return {"type": "error", "error": {"type": kind, "message": message}, "request_id": request_id}


def ollama_error(problem: Problem) -> dict[str, object]:
    """Return the error body of Ollama's API."""
    return {"error": problem.message}


def _is_ours(problem: Problem) -> bool:
    return problem.status >= HTTPStatus.INTERNAL_SERVER_ERROR or problem.status == CANCELLED


_PROBLEM: Final = "problem"


def reported(scope: Scope) -> Problem | None:
    """Return the problem of the error response to the request of `scope`, if it has one."""
    problem: Problem | None = scope.get("state", {}).get(_PROBLEM)
    return problem


def problem_response(scope: Scope, problem: Problem) -> Response:
    """Return the error response in the form of the request's API."""
    scope.setdefault("state", {})[_PROBLEM] = problem
    if is_anthropic(scope["path"]):
        body = anthropic_error(problem, request_id_of(scope))
    elif is_ollama(scope["path"]):
        body = ollama_error(problem)
    else:
        body = openai_error(problem)
    headers = id_headers(request_id_of(scope))
    if problem.retry_after is not None:
        headers["retry-after"] = str(problem.retry_after)
    if problem.status in _NOT_TO_BE_REPEATED:
        headers["x-should-retry"] = "false"
    if problem.status == HTTPStatus.UNAUTHORIZED:
        headers["www-authenticate"] = "Bearer"
    if problem.closes or problem.status in _CLOSING:
        headers["connection"] = "close"
    return JSONResponse(body, problem.status, headers)


def is_anthropic(path: str) -> bool:
    """Return whether errors at `path` have Anthropic's form."""
    return _is_below(path, _ANTHROPIC_PATHS)


def is_ollama(path: str) -> bool:
    """Return whether errors at `path` have Ollama's form."""
    return _is_below(path, _OLLAMA_PATHS) and not _is_below(path, _LM_STUDIO_PATHS)


def _is_below(path: str, prefix: str) -> bool:
    return path == prefix or path.startswith(prefix + "/")


def id_headers(request_id: str | None) -> dict[str, str]:
    """Return two headers with the request id: OpenAI and Anthropic use different names."""
    return {} if request_id is None else {"x-request-id": request_id, "request-id": request_id}


_EXPECTED: Final = (
    WireError,
    RequestError,
    CapacityError,
    ModelLoadError,
    HTTPException,
    RequestValidationError,
)
"""Errors with a message for the client. Any other error is a bug."""


def method_and_path(scope: Scope) -> str:
    """Return the method and the path of a request, of at most 200 characters."""
    return f"{scope['method']} {scope['path']}"[:200]


def request_id_of(scope: Scope) -> str | None:
    """Return the id under which the log lists the request."""
    state: Mapping[str, object] = scope.get("state", {})
    found = state.get("request_id")
    return found if isinstance(found, str) else None


def add_error_handlers(app: FastAPI) -> None:
    """Install handlers that turn every error of a route into an error response."""
    for kind in _EXPECTED:
        app.add_exception_handler(kind, _expected)
    app.add_exception_handler(OSError, _of_the_system)
    app.add_exception_handler(ClientDisconnectedError, _client_disconnected)
    app.add_exception_handler(Exception, _unexpected)


def _expected(request: Request, error: Exception) -> Response:
    problem = problem_of(error)
    if problem.status == HTTPStatus.NOT_FOUND and problem.message == HTTPStatus.NOT_FOUND.phrase:
        asked = method_and_path(request.scope)
        problem = replace(problem, message=f"{asked} is not a route; GET /openapi.json has all")
    response = problem_response(request.scope, problem)
    if isinstance(error, HTTPException):
        response.headers.update(error.headers or {})
        if error.status_code == HTTPStatus.METHOD_NOT_ALLOWED:
            response.headers["allow"] = ", ".join(_allowed_methods(request))
    return response


def _of_the_system(request: Request, error: Exception) -> Response:
    problem = problem_of(error)
    if problem.status == HTTPStatus.INTERNAL_SERVER_ERROR:
        raise error
    logger.warning("request %s: %s", request_id_of(request.scope), error)
    return problem_response(request.scope, problem)


def _allowed_methods(request: Request) -> list[str]:
    """Return all methods of the path. The router reports only those of the first route."""
    return [
        method
        for method in _METHODS
        if any(
            route.matches({**request.scope, "method": method})[0] is Match.FULL
            for route in request.app.routes
        )
    ]


def _client_disconnected(_request: Request, _error: Exception) -> Response:
    return Response(status_code=CANCELLED)


def _unexpected(request: Request, error: Exception) -> Response:
    request_id = request_id_of(request.scope)
    logger.error("request %s failed", request_id, exc_info=error)
    problem = replace(problem_of(error), closes=True)  # uvicorn closes the connection
    response = problem_response(request.scope, problem)
    if request_id is not None:
        # This handler runs outside all middleware, so it must set the id itself.
        response.headers.update({"request-id": request_id, "x-request-id": request_id})
    return response


# Events of streams; the last event may be an error

NDJSON: Final = "application/x-ndjson"
"""The media type of a stream of JSON lines."""
_LINE_ENDS: Final = str.maketrans({mark: f"\\u{ord(mark):04x}" for mark in "\x85\u2028\u2029"})
"""Unicode line separators, at which some readers split lines."""

_encode: Final = json.JSONEncoder(ensure_ascii=False, allow_nan=False).encode


def sse_event(data: object, event: str | None = None) -> bytes:
    """Return a server-sent event named `event`. `data` is JSON or one line of text."""
    if not isinstance(data, str):
        data = _encode(data).translate(_LINE_ENDS)
    name = "" if event is None else f"event: {event}\n"
    return f"{name}data: {data}\n\n".encode()


def json_line(data: object) -> bytes:
    """Return `data` as JSON in one line, with a line end."""
    return f"{_encode(data).translate(_LINE_ENDS)}\n".encode()
