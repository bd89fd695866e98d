"""Checks that both wires make of single fields. Knows nothing of the rest of a body."""

from __future__ import annotations

from semantic.adapters.http.errors import FieldError
from semantic.domain.errors import ModelNotFoundError
from semantic.ports.serving import ServedModel


def check_model(name: str, model: ServedModel) -> None:
    """Raise ModelNotFoundError, with the names that there are, unless `name` is one of them."""
    if name not in model.names:
        known = ", ".join(model.names)
        raise ModelNotFoundError(f"there is no model {name[:200]!r}; this server has: {known}")


def at_least_one(name: str, value: int | None) -> int | None:
    """`value`. Raises FieldError for one below 1."""
    if value is not None and value < 1:
        raise FieldError(f"{name} must be at least 1, got {value}", param=name)
    return value
