"""Grammar: the constraint on structured output. Knows nothing about token masks or libraries."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Grammar:
    """A grammar that an answer must match; the answer may end only where the grammar allows an end.
    `kind` says whether `text` is a JSON schema or a grammar in Lark's notation. `after` is a text,
    the end mark of reasoning: the grammar applies only to the answer after this text. `tenant` sent
    the grammar: the time to compile it must not depend on the grammars of other tenants."""

    kind: Literal["json_schema", "lark"]
    text: str
    after: str | None = None
    tenant: str = ""
