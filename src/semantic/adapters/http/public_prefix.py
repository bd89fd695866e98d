"""Public prefixes: files with the start of a conversation whose cache all tenants share.

Knows the two file formats; not how the prefix is used.
"""

from __future__ import annotations

from pathlib import Path

from semantic.adapters.http.openai.chat.conversation import messages_of, tools_of
from semantic.adapters.http.request_body import parse_object
from semantic.domain.chat import Chat, Message
from semantic.domain.errors import InvalidRequestError


def read_public_prefix(path: Path) -> Chat:
    """Read the conversation in `path`: a .json file has the fields `messages` and optionally
    `tools` of a chat completion request; any other file is the text of a system message.

    Raises InvalidRequestError.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise InvalidRequestError(f"public_prefix: {path}: {error.strerror}") from error
    try:
        if path.suffix != ".json":
            return Chat((Message("system", data.decode()),))
        fields = parse_object(data)
        return Chat(messages_of(fields.get("messages")), tools_of(fields.get("tools", [])))
    except (InvalidRequestError, UnicodeDecodeError) as error:
        raise InvalidRequestError(f"public_prefix: {path}: {error}") from error
