"""Grammar: the constraint on structured output."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Grammar:
    """A grammar that an answer must match."""

    kind: Literal["json_schema", "lark"]
    text: str
    after: str | None = None  # the grammar applies only after this end mark of reasoning
    tenant: str = ""  # the sender; tenants share no compiled grammars
