"""ModelsPort: the models of a server, only some of them loaded. A client's call or a request loads
a model. Runs on an event loop and never blocks it."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from semantic.ports.agents import AgentsPort
from semantic.ports.serving import ServedModel, ServingPort

ModelState = Literal["unloaded", "loading", "loaded", "unloading"]


@dataclass(frozen=True, slots=True)
class ModelStatus:
    """The current status of a model. `n_bytes` is the size of its weights and its pool while
    loaded; shared weights count for the first model that uses them.

    `running` requests use it, `waiting` requests wait until it is loaded. Without another request
    it unloads in `expires_in` seconds; None: the time is not known, or it stays. It has been idle
    for `idle_for` seconds; None while in use or unloaded.
    """

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
    """How much of a model has been downloaded: `n_bytes` of `total_bytes`. `version` identifies the
    contents."""

    version: str
    n_bytes: int
    total_bytes: int


OnArrived = Callable[[Arrived], None]


class ModelsPort(Protocol):
    """The models of a server; the first serves requests that name none. Methods take any name that
    a model accepts, and raise ModelNotFoundError for any other name."""

    def serving_of(self, name: str | None = None) -> ServingPort:
        """Return a model. Requests to it load it if necessary, and wait until it is loaded."""

    def agents_of(self, name: str | None = None) -> AgentsPort:
        """Return the agents of a model. Calls that need the model load it; `requests` lists those
        of all models."""

    def statuses(self) -> Sequence[ModelStatus]:
        """Return the status of every model, in order."""

    def status(self, name: str) -> ModelStatus:
        """Return the status of one model."""

    def keep(self, name: str, seconds: float | None) -> None:
        """Unload the model after `seconds` without a request, counted from now on; None: never."""

    def load(self, name: str) -> Coroutine[object, object, ModelStatus]:
        """Load the model unless it is loaded. Raises ModelLoadError and OverloadedError."""

    def unload(self, name: str) -> Coroutine[object, object, ModelStatus]:
        """Unload the model once the requests that use it have finished. New requests load it
        again."""

    def fetch(self, hub_id: str, on_arrived: OnArrived) -> Coroutine[object, object, ModelStatus]:
        """Download a hub model, or complete its download, and serve it: a request that names the
        model loads it. Downloads run one at a time; a model that is already served needs none.
        Calls `on_arrived` on the event loop. A cancellation stops the download; the next call
        continues it.

        Raises InvalidRequestError, before it fetches anything, for an invalid hub id or a model
        that does not fit, ModelNotFoundError, and OperatorError if the hub or the disk fails.
        """
