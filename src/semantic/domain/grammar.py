"""Grammar: the constraint on structured output. Knows nothing about token masks or libraries."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Grammar:
    """A grammar that an answer must match; the answer may end only where the grammar allows an end.
    `kind` says whether `text` is a JSON schema or a grammar in Lark's notation. `after` is a text
    (the end mark of reasoning) up to whose end the answer is free; the grammar applies after it.
    `tenant` sent the grammar: the time to compile it must not depend on what other tenants sent."""

    kind: Literal["json_schema", "lark"]
    text: str
    after: str | None = None
    tenant: str = ""
