"""What an operator lets all tenants share: a file with the beginning of a conversation.

Knows the file's two forms; not what is done with it.
"""

from __future__ import annotations

from pathlib import Path

from semantic.adapters.http.openai.chat.conversation import messages_of, tools_of
from semantic.adapters.http.request_body import parse_object
from semantic.domain.chat import Chat, Message
from semantic.domain.errors import InvalidRequestError


def read_public_prefix(path: Path) -> Chat:
    """The conversation in `path`: a .json file has the fields `messages` and perhaps `tools` of
    a chat completion's body, any other file is the text of a system message.

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
