"""A maker's SDK as a program: it sends each request that a line of standard input names, and
prints what it read of the answer.

    python -m tests.clients.speak openai|anthropic|ollama
"""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Callable, Iterable
from typing import Final, Protocol, cast

Json = dict[str, object]


class Read(Protocol):
    """What an SDK makes of an answer, or of a piece of one."""

    def model_dump(self, *, mode: str, exclude_unset: bool) -> Json: ...


Call = Callable[..., "Read | Iterable[Read]"]

CLIENTS: Final = {"openai": "OpenAI", "anthropic": "Anthropic", "ollama": "Client"}
_CALLS: Final = {
    "/v1/chat/completions": "chat.completions.create",
    "/v1/responses": "responses.create",
    "/v1/messages": "messages.create",
    "/api/chat": "chat",
}


def call_of(sdk: str, url: str, path: str) -> Call:
    """What sends a request to `path` of the server at `url`."""
    made = getattr(importlib.import_module(sdk), CLIENTS[sdk])
    keyed = {"api_key": "none", "max_retries": 0}
    given: dict[str, dict[str, object]] = {
        "openai": {"base_url": f"{url}/v1", **keyed},
        "anthropic": {"base_url": url, **keyed},
        "ollama": {"host": url},
    }
    found: object = made(**given[sdk])
    for name in _CALLS[path].split("."):
        found = getattr(found, name)
    return cast("Call", found)


def dumped(read: Read) -> Json:
    return read.model_dump(mode="json", exclude_unset=True)


def main(sdk: str) -> None:
    """Answer lines until standard input ends: the pieces of a stream, else one reply."""
    for line in sys.stdin:
        url, path, body = json.loads(line)
        answer = call_of(sdk, url, path)(**body)
        # An SDK's answer can be iterated over too: by its fields.
        parts = cast("Iterable[Read]", answer) if body.get("stream") else [cast("Read", answer)]
        sys.stdout.write(json.dumps([dumped(part) for part in parts]) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1])
