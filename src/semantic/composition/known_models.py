"""Models with short names: their hub ids, and the memory they need."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path
from typing import Final

_TABLE: Final = Path(__file__).parents[1] / "models" / "known.toml"


@dataclass(frozen=True, slots=True)
class KnownModel:
    """A model of the package's table. Each token of an agent takes `token_bytes` in 16 bits;
    `n_bytes` are those of the weights."""

    name: str
    hub_id: str
    n_bytes: int
    token_bytes: int
    context_tokens: int
    good_for: str


@functools.cache
def known_models() -> tuple[KnownModel, ...]:
    """Return the models of the table, best for coding agents first."""
    import tomllib  # not for commands without models

    table = tomllib.loads(_TABLE.read_text("utf-8"))
    return tuple(
        KnownModel(name, one["hub"], one["bytes"], one["token_bytes"], one["context"], one["for"])
        for name, one in table.items()
    )


def known_hub_id(name: str) -> str | None:
    """Return the hub id of a short name, or None."""
    return next((one.hub_id for one in known_models() if one.name == name), None)
