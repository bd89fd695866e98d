"""The key by which a request is routed: equal for all requests of one session, so that they meet
their caches.

The rules of names are those of `identity`; a request without one is known by the opening of its
conversation. Keys are digests: a router sees no text of a user. Knows no router.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from typing import Final

from semantic.adapters.http.identity import AGENT_FIELD, AGENT_HEADER, Json, read_identity
from semantic.adapters.http.openai.responses.kept_items import RESPONSE_PREFIX
from semantic.adapters.http.openai.responses.output_items import ID_BYTES
from semantic.adapters.http.openai.responses.routes import RESPONSES_PATH
from semantic.domain.identity import home_of

_AGENT_PATH: Final = re.compile(r"/v1/agents/(.+?)(?:/(?:why|fork|pin))?")
_LISTS: Final = ("messages", "input", "prompt")
"""Fields with what a conversation begins with, of all wires; a text or a list."""
_FIXED: Final = ("system", "instructions")
"""Fields with what precedes it."""
_TEXT: Final = 2048
"""Characters of a prompt that are its opening."""
_TOKENS: Final = 512
"""Token ids that are."""
_USER: Final = "user"
_CACHE_MARK: Final = "cache_control"
_DIGITS: Final = 8
"""Of a key; ids of responses end with them. Keys that are equal by chance harm nothing."""
_RESPONSE_ID: Final = re.compile(
    rf"{RESPONSE_PREFIX}[0-9a-f]{{{2 * ID_BYTES}}}(?P<key>[0-9a-f]{{{_DIGITS}}})"
)
_RESPONSE_PATH: Final = re.compile(rf"{RESPONSES_PATH}/([^/]+)(?:/input_items)?")
_PREVIOUS: Final = "previous_response_id"


def routing_key(path: str, headers: Mapping[str, str], body: Json, tenant: str = "") -> str:
    """The key of a request to `path`; `headers` have lower-case names.

    A request that names an agent, in its path, its header or its body, has the agent's; one with
    a client's session that of the session's main agent; one that continues a response, or is about
    it, that of the request that it answered, which is in its id; any other that of its opening.
    Sessions that several conversations share, as those of a user, do not count.
    """
    found = _named(path, headers, body)
    if found is None:
        identity = read_identity(headers, body)
        if identity is not None and not identity.shared:
            found = home_of(identity.name)
    of_response = _key_of_response(path, body)
    if found is None and of_response is not None:
        return of_response
    name = f"opening:{_opening(body)}" if found is None else f"agent:{found}"
    text = f"{len(tenant)}:{tenant}{name}".encode("utf-8", "surrogatepass")
    return hashlib.sha256(text).hexdigest()[:_DIGITS]


def _named(path: str, headers: Mapping[str, str], body: Json) -> str | None:
    in_path = _AGENT_PATH.fullmatch(path)
    given = headers.get(AGENT_HEADER, body.get(AGENT_FIELD)) if in_path is None else in_path[1]
    return home_of(given) if isinstance(given, str) and given else None


def _key_of_response(path: str, body: Json) -> str | None:
    in_path = _RESPONSE_PATH.fullmatch(path)
    given = body.get(_PREVIOUS) if in_path is None else in_path[1]
    match = _RESPONSE_ID.fullmatch(given) if isinstance(given, str) else None
    return None if match is None else match["key"]


def _opening(body: Json) -> str:
    """What stays of a conversation while it grows: all up to its first message of the user."""
    fixed = [_words(body[name]) for name in _FIXED if name in body]
    begins = [_words(_first(body[name])) for name in _LISTS if name in body]
    return json.dumps([fixed, begins])


def _first(found: object) -> object:
    if isinstance(found, str):
        return found[:_TEXT]
    if not isinstance(found, list):
        return None
    for number, one in enumerate(found):
        if isinstance(one, dict) and one.get("role") == _USER:
            return found[: number + 1]
    return found[:_TOKENS] if all(isinstance(one, int) for one in found) else found[:1]


def _words(found: object) -> str:
    """The text of messages, without what clients change in earlier ones: marks of caches, and
    whether a text is a list of one part."""
    if isinstance(found, str):
        return found
    if isinstance(found, list):
        return "\n".join(map(_words, found))
    if not isinstance(found, dict):
        return json.dumps(found)
    inner = found.get("content", found.get("text"))
    if inner is not None:
        return _words(inner)
    plain = {name: value for name, value in found.items() if name != _CACHE_MARK}
    return json.dumps(plain, sort_keys=True)
