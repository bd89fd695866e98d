"""ModelsPort: the models of a server, only some of them loaded. A model loads at the first request
that needs it, or when a client asks for it. Methods run on an event loop and never block it."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from semantic.ports.agents import AgentsPort
from semantic.ports.serving import ServedModel, ServingPort

ModelState = Literal["unloaded", "loading", "loaded", "unloading"]


@dataclass(frozen=True, slots=True)
class ModelStatus:
    """The current status of a model. While the model is loaded, `n_bytes` is the size of its
    weights and its pool; shared weights count for the first of the models that share them.
    `running` requests use the model, `waiting` requests wait for its loading. Without another
    request the model unloads in `expires_in` seconds; None if it stays or the time is unknown. The
    model has been idle for `idle_for` seconds; None while the model is in use or not loaded."""

    served: ServedModel
    state: ModelState
    n_bytes: int
    running: int
    waiting: int
    pinned: bool
    expires_in: float | None
    idle_for: float | None = None


@dataclass(frozen=True, slots=True)
class Arrived:
    """The progress of a model's download: `n_bytes` of `total_bytes`. `version` identifies the
    downloaded contents."""

    version: str
    n_bytes: int
    total_bytes: int


OnArrived = Callable[[Arrived], None]


class ModelsPort(Protocol):
    """The models of a server; the first serves requests that name no model. Methods accept every
    name of a model, and raise ModelNotFoundError for an unknown name."""

    def serving_of(self, name: str | None = None) -> ServingPort:
        """Return the model `name`. Requests load the model if necessary, and wait meanwhile."""

    def agents_of(self, name: str | None = None) -> AgentsPort:
        """Return the agents of a model. A call that needs the weights loads the model. The agents'
        method `requests` lists the requests of all models."""

    def statuses(self) -> Sequence[ModelStatus]:
        """Return the status of every model, in the order of the models."""

    def status(self, name: str) -> ModelStatus:
        """Return the status of one model."""

    def keep(self, name: str, seconds: float | None) -> None:
        """Set after how many seconds without a request the model unloads; None means never."""

    def load(self, name: str) -> Coroutine[object, object, ModelStatus]:
        """Load the model if necessary. Raises ModelLoadError and OverloadedError."""

    def unload(self, name: str) -> Coroutine[object, object, ModelStatus]:
        """Unload the model once the requests that use it have finished. New requests load it
        again."""

    def fetch(self, hub_id: str, on_arrived: OnArrived) -> Coroutine[object, object, ModelStatus]:
        """Download a hub model, or complete its download, and serve it: a request that names the
        model loads it. Downloads run one at a time. Downloads nothing for a served model. Calls
        `on_arrived` on the event loop. A cancellation stops the download; the next call continues
        it. Raises ModelNotFoundError, and OperatorError if the hub or the disk fails. Before a
        download, raises InvalidRequestError for an invalid hub id or a model that does not fit."""
