"""The models of a server, not all of them loaded. Methods run on an event loop and never block
it."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from semantic.ports.agents import AgentsPort
from semantic.ports.serving import ServedModel, ServingPort

ModelState = Literal["unloaded", "loading", "loaded", "unloading"]


@dataclass(frozen=True, slots=True)
class ModelStatus:
    """The current status of a model."""

    served: ServedModel
    state: ModelState
    n_bytes: int
    """Size of its weights and its pool. Shared weights count once."""
    running: int
    waiting: int
    """Requests that wait until the model is loaded."""
    pinned: bool
    expires_in: float | None
    """Seconds until an idle model unloads; None means never or unknown."""
    idle_for: float | None = None
    """Seconds without a request, or None."""


@dataclass(frozen=True, slots=True)
class Arrived:
    """The progress of a download: `n_bytes` of `total_bytes`. `version` identifies the contents."""

    version: str
    n_bytes: int
    total_bytes: int


OnArrived = Callable[[Arrived], None]


class ModelsPort(Protocol):
    """The models of a server. Methods raise ModelNotFoundError for an unknown name."""

    def serving_of(self, name: str | None = None) -> ServingPort:
        """Return the model `name`. A request loads it if necessary."""

    def agents_of(self, name: str | None = None) -> AgentsPort:
        """Return the agents of a model. `requests` lists the requests of all models."""

    def statuses(self) -> Sequence[ModelStatus]:
        """Return the status of every model, in order."""

    def status(self, name: str) -> ModelStatus:
        """Return the status of one model."""

    def keep(self, name: str, seconds: float | None) -> None:
        """Set after how many seconds without a request the model unloads. None means never."""

    def load(self, name: str) -> Coroutine[object, object, ModelStatus]:
        """Load the model if necessary. Raises ModelLoadError and OverloadedError."""

    def unload(self, name: str) -> Coroutine[object, object, ModelStatus]:
        """Unload the model once its requests have finished. A new request loads it again."""

    def fetch(self, hub_id: str, on_arrived: OnArrived) -> Coroutine[object, object, ModelStatus]:
        """Download a hub model and serve it. One download runs at a time. A cancellation stops it;
        the next call continues it. Raises ModelNotFoundError, InvalidRequestError for a model that
        does not fit, and OperatorError if the download fails."""
