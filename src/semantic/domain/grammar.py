"""Grammar: the constraint on structured output. Knows nothing about token masks or libraries."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Grammar:
    """A grammar that an answer must match; the answer may end only where the grammar allows an end.
    `kind` says whether `text` is a JSON schema or a grammar in Lark's notation. `after` is text
    that must precede the constrained part (the end mark of reasoning); everything before it is
    free. `tenant` is the sender: the time to compile a grammar must not depend on what other
    tenants sent."""

    kind: Literal["json_schema", "lark"]
    text: str
    after: str | None = None
    tenant: str = ""
