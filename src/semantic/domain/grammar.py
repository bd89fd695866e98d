"""Grammar: the constraint of structured output. Knows no masks of tokens and no library."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Grammar:
    """A grammar that an answer must match; the answer may end only where the grammar allows it.
    `kind`: `text` is a JSON schema, or a grammar in Lark's notation. `after` is text that must
    precede the constrained part (the end mark of reasoning); everything before it is free. `tenant`
    sent it: the time to compile it must not depend on what others sent."""

    kind: Literal["json_schema", "lark"]
    text: str
    after: str | None = None
    tenant: str = ""
