"""ModelsPort: the models of a server, some of them loaded. A client or a request loads one. Runs on
an event loop and never blocks it."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from semantic.ports.agents import AgentsPort
from semantic.ports.serving import ServedModel, ServingPort

ModelState = Literal["unloaded", "loading", "loaded", "unloading"]


@dataclass(frozen=True, slots=True)
class ModelStatus:
    """A model now. `n_bytes` are those of its weights and its pool while loaded; shared weights
    count for the first that has them.

    `running` requests use it, `waiting` ones wait for its load. Without another request it unloads
    in `expires_in` seconds; None: that is open, or it stays. It is idle for `idle_for` seconds;
    None while in use or unloaded.
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
    """How much of a model is here: `n_bytes` of `total_bytes`. `version` names the contents."""

    version: str
    n_bytes: int
    total_bytes: int


OnArrived = Callable[[Arrived], None]


class ModelsPort(Protocol):
    """The models of a server; the first serves requests that name none. Methods take any name that
    a model accepts, and raise ModelNotFoundError for another one."""

    def serving_of(self, name: str | None = None) -> ServingPort:
        """A model. Its requests load it, and wait for that."""

    def agents_of(self, name: str | None = None) -> AgentsPort:
        """The agents of a model. Calls for them load it; requests are those of all models."""

    def statuses(self) -> Sequence[ModelStatus]:
        """All models, in order."""

    def status(self, name: str) -> ModelStatus:
        """One of them."""

    def keep(self, name: str, seconds: float | None) -> None:
        """Unload the model after so many seconds without a request, from now on; None: never."""

    def load(self, name: str) -> Coroutine[object, object, ModelStatus]:
        """Load the model, if it is not. Raises ModelLoadError and OverloadedError."""

    def unload(self, name: str) -> Coroutine[object, object, ModelStatus]:
        """Unload the model when the requests that use it have ended. New ones load it again."""

    def fetch(self, hub_id: str, on_arrived: OnArrived) -> Coroutine[object, object, ModelStatus]:
        """Download or complete a model of the hub, one at a time, and serve it: a request that
        names it loads it. Fetches nothing of a served one. Calls `on_arrived` on the event loop. A
        cancellation stops it; the next call goes on from there.

        Raises InvalidRequestError, before it fetches anything, for an invalid hub id or a model
        that does not fit, ModelNotFoundError, and OperatorError when hub or disk fail.
        """
