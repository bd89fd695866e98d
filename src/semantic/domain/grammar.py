"""What generated text must look like, as a value: it goes with the sampling parameters.

Says what is wanted; not how tokens are masked, nor in which library.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Grammar:
    """A language that an answer has to be in.

    `kind` says what `text` is: a JSON schema, or a grammar in Lark's notation. `after` is a text
    that the answer has to contain before the language begins (the end of a thought); what comes
    before is free. An answer may only end where the language allows it.
    """

    kind: Literal["json_schema", "lark"]
    text: str
    after: str | None = None
