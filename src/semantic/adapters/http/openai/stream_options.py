"""Whether a reply is a stream, and what its chunks tell of tokens; the same on both wires."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from semantic.adapters.http.errors import FieldError
from semantic.adapters.http.openai.fields import STREAM_OPTION_FIELDS, known_fields
from semantic.adapters.http.openai.parts import object_at


@dataclass(frozen=True, slots=True)
class StreamOptions:
    """How a reply is sent.

    With `usage` a stream ends with a chunk that tells the tokens used. With `running_usage` the
    last chunk of each choice tells those used so far, too: how many tokens a choice has is known
    at its end.
    """

    stream: bool = False
    usage: bool = False
    running_usage: bool = False


def stream_options(body: Mapping[str, object], *, force_usage: bool) -> StreamOptions:
    """What a body with checked types asks for. `force_usage` tells usage to those who did not ask.

    Raises FieldError for options of a stream where none is asked for.
    """
    stream = body.get("stream") is True
    value = body.get("stream_options")
    if value is None:
        return StreamOptions(stream, usage=stream and force_usage)
    if not stream:
        raise FieldError(
            "stream_options: only for a stream; expected stream to be true", param="stream_options"
        )
    path = "stream_options"
    options = known_fields(object_at(path, value), STREAM_OPTION_FIELDS, f"{path}.")
    running = _flag(options, "continuous_usage_stats")
    return StreamOptions(
        stream,
        usage=_flag(options, "include_usage") or force_usage or running,
        running_usage=running,
    )


def _flag(options: Mapping[str, object], name: str) -> bool:
    value = options.get(name, False)
    if not isinstance(value, bool):
        path = f"stream_options.{name}"
        raise FieldError(f"{path}: expected true or false", param=path)
    return value
