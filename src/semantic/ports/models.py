"""The models of a server. Only some of them are loaded. Methods run on an event loop and never
block the loop."""

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
    """The size of its weights and its pool in bytes. Weights that models share count once."""
    running: int
    waiting: int
    """The number of requests that wait until the model is loaded."""
    pinned: bool
    expires_in: float | None
    """Seconds until the idle model unloads. None means never or unknown."""
    idle_for: float | None = None
    """Seconds since its last request, or None."""


@dataclass(frozen=True, slots=True)
class Arrived:
    """The progress of a download: `n_bytes` of `total_bytes`. `version` is the files' version."""

    version: str
    n_bytes: int
    total_bytes: int


OnArrived = Callable[[Arrived], None]


class ModelsPort(Protocol):
    """The models of a server. Methods raise ModelNotFoundError for an unknown name."""

    def serving_of(self, name: str | None = None) -> ServingPort:
        """Return the model `name`. Loads the model if necessary."""

    def agents_of(self, name: str | None = None) -> AgentsPort:
        """Return a model's agents. Their method `requests` lists the requests of all models."""

    def statuses(self) -> Sequence[ModelStatus]:
        """Return the status of every model, in the order of the models."""

    def status(self, name: str) -> ModelStatus:
        """Return the status of one model."""

    def keep(self, name: str, seconds: float | None) -> None:
        """Set the seconds without a request after which the model unloads. None means never."""

    def load(self, name: str) -> Coroutine[object, object, ModelStatus]:
        """Load the model if necessary. Raises ModelLoadError and OverloadedError."""

    def unload(self, name: str) -> Coroutine[object, object, ModelStatus]:
        """Unload the model once its requests have finished. A new request loads it again."""

    def fetch(self, hub_id: str, on_arrived: OnArrived) -> Coroutine[object, object, ModelStatus]:
        """Download a model from the hub and serve it. One download runs at a time. A cancelled
        download continues at the next call. Raises ModelNotFoundError, InvalidRequestError for a
        model that does not fit, and OperatorError if the download fails."""
