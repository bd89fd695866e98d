"""Output items of stored responses by their ids, for inputs that refer to them.

An item's id has that of its response, so that no index of items is needed. Knows ids and stored
bodies; not what an item means.
"""

from __future__ import annotations

import json
import re
from http import HTTPStatus
from typing import Final

from semantic.adapters.http.errors import WireError
from semantic.adapters.http.openai.fields import Json
from semantic.ports.responses import ResponsesPort

RESPONSE_PREFIX: Final = "resp_"

_ITEM_ID: Final = re.compile(r"[a-z]+_(?P<response>[0-9a-f]+)_[0-9]+")


def item_id(prefix: str, response_id: str, index: int) -> str:
    """The id of output item number `index` of a response; `prefix` is msg, rs or fc."""
    return f"{prefix}_{response_id.removeprefix(RESPONSE_PREFIX)}_{index}"


class KeptItems:
    """The output items of a tenant's stored responses. Each response is read once."""

    def __init__(self, store: ResponsesPort, tenant: str) -> None:
        self._store = store
        self._tenant = tenant
        self._read: dict[str, dict[str, Json]] = {}

    def item(self, path: str, given: str) -> Json:
        """The item with the id `given`, as it was returned; `path` is where it is referred to.

        Raises WireError if its response is not stored, and StoreError if that cannot be read now.
        """
        match = _ITEM_ID.fullmatch(given)
        found = self._items(RESPONSE_PREFIX + match["response"]).get(given) if match else None
        if found is None:
            message = (
                f"Item with id {given!r:.200} not found. Items are kept with their response, "
                "unless store was false"
            )
            raise WireError(HTTPStatus.NOT_FOUND, message, param=path, code="item_not_found")
        return found

    def _items(self, response_id: str) -> dict[str, Json]:
        if response_id not in self._read:
            response = self._store.get(self._tenant, response_id)
            output = [] if response is None else json.loads(response.body)["output"]
            self._read[response_id] = {one["id"]: one for one in output}
        return self._read[response_id]
