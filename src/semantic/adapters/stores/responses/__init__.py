"""Responses under their ids in one SQLite file, which survives the process."""

from semantic.adapters.stores.responses.sqlite import SqliteResponses
from semantic.adapters.stores.responses.steady import SteadyResponses

__all__ = ["SqliteResponses", "SteadyResponses"]
