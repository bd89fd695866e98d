"""Residency: decides which models are in memory, within one budget of bytes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field

from semantic.domain.errors import InvalidRequestError
from semantic.ports.models import ModelState

_MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Patience:
    """The time that a model stays loaded while another model needs the memory."""

    residence: float = 4.0  # after loading, in multiples of the loading time
    linger: float = 0.25  # when idle, in multiples of the loading time
    longest: float = 30.0  # in seconds, for both


@dataclass(eq=False, slots=True)
class Ticket:
    """A request that waits for the model `name` since the time `since`, in seconds."""

    name: str
    since: float


@dataclass(frozen=True, slots=True)
class Change:
    """The next change. Loads the model if `loads` is true, else unloads it."""

    name: str
    loads: bool


@dataclass(frozen=True, slots=True)
class Weights:
    """Weights that models with the same `key` share."""

    key: str
    n_bytes: int


@dataclass(slots=True)
class _Model:
    # A loaded model needs `n_bytes` in addition to its `weights`. It unloads after `ttl` seconds
    # without a request; None is never.

    name: str
    n_bytes: int
    weights: Weights | None
    ttl: float | None
    pinned: bool
    state: ModelState = "unloaded"
    tickets: list[Ticket] = field(default_factory=list)
    uses: int = 0
    load_seconds: float = 0.0
    loaded_at: float = 0.0
    last_used: float = 0.0
    leaving: bool = False
    to_unload: bool = False

    @property
    def is_idle(self) -> bool:
        return not self.uses and (self.leaving or not self.tickets)

    def expires(self) -> float | None:
        """The time to unload the model if no request comes, or None."""
        if self.pinned or self.ttl is None or self.state != "loaded" or self.uses or self.tickets:
            return None
        return self.last_used + self.ttl

    def gives_way(self, patience: Patience) -> float:
        """Return the time from which another model may replace this one."""
        residence = min(patience.longest, patience.residence * self.load_seconds)
        until = self.loaded_at + residence
        if not self.is_idle:
            return until
        linger = min(patience.longest, patience.linger * self.load_seconds)
        return min(until, self.last_used + linger)


class Residency:
    """Decides which models are in memory. The caller reports events, and makes the changes of
    `next_change`."""

    def __init__(self, capacity: int, patience: Patience | None = None) -> None:
        """`capacity` limits the bytes of all loaded models."""
        self.capacity = self._most = capacity
        self._patience = patience or Patience()
        self._models: dict[str, _Model] = {}

    def add(
        self,
        name: str,
        n_bytes: int,
        *,
        weights: Weights | None = None,
        ttl: float | None = None,
        pinned: bool = False,
    ) -> None:
        """Add a model that needs `n_bytes` in addition to its `weights`. Raises InvalidRequestError
        if the model does not fit beside the pinned models."""
        before = self._models
        # Another dictionary: other threads may be iterating over this one.
        self._models = {**before, name: _Model(name, n_bytes, weights, ttl, pinned)}
        with ExitStack() as undo:
            undo.callback(setattr, self, "_models", before)
            for one in self._models.values():
                self._require_fits(one)
            undo.pop_all()

    # State

    def state(self, name: str) -> ModelState:
        return self._models[name].state

    def is_open(self, name: str) -> bool:
        """Return whether the model accepts new requests now."""
        model = self._models[name]
        return model.state == "loaded" and not model.leaving

    def n_bytes(self, name: str) -> int:
        """Return the bytes that the model needs while loaded. Shared weights count once."""
        model = self._models[name]
        others = (one for one in self._present() if one.weights == model.weights)
        if model.weights is None or next(others, model) is not model:
            return model.n_bytes
        return model.n_bytes + model.weights.n_bytes

    def is_pinned(self, name: str) -> bool:
        """Return whether the model always stays loaded."""
        return self._models[name].pinned

    def requests(self, name: str) -> tuple[int, int]:
        """Return the number of requests that use the model, and the number that wait for it."""
        model = self._models[name]
        return model.uses, len(model.tickets)

    def expires(self, name: str) -> float | None:
        """Return the time to unload the model if no request comes, or None."""
        return self._models[name].expires()

    def last_used(self, name: str) -> float | None:
        """Return the time of the model's last use; None if in use or unloaded."""
        model = self._models[name]
        return None if model.uses or model.state != "loaded" else model.last_used

    @property
    def used(self) -> int:
        """The bytes of all models in memory."""
        return _bytes_of(self._present())

    def fits(self, name: str) -> bool:
        """Return whether the model is loaded, or fits beside the loaded models."""
        model = self._models[name]
        return model.state != "unloaded" or self._fit((*self._present(), model))

    def idle(self, n_bytes: int) -> list[str]:
        """Return the idle models to unload to free `n_bytes`, least recently used first."""
        models = tuple(self._models.values())
        if any(one.to_unload or one.state == "unloading" for one in models):
            return []
        idle = [one for one in models if one.state == "loaded" and one.is_idle and not one.pinned]
        stay, least = [*self._present()], self.used - n_bytes
        chosen: list[str] = []
        for one in sorted(idle, key=lambda one: one.last_used):
            if _bytes_of(stay) > least:
                chosen.append(one.name)
                stay.remove(one)
        return chosen

    # Events

    def wait(self, name: str, now: float) -> Ticket:
        """Record that a request waits for a model."""
        ticket = Ticket(name, now)
        self._models[name].tickets.append(ticket)
        return ticket

    def leave(self, ticket: Ticket) -> None:
        """Record that a request no longer waits."""
        tickets = self._models[ticket.name].tickets
        if ticket in tickets:
            tickets.remove(ticket)

    def begin(self, name: str, now: float) -> None:
        model = self._models[name]
        model.uses += 1
        model.last_used = now

    def end(self, name: str, now: float) -> None:
        model = self._models[name]
        model.uses -= 1
        model.last_used = now

    def keep(self, name: str, ttl: float | None) -> None:
        """Unload the model after `ttl` seconds without a request. None means never."""
        self._models[name].ttl = ttl

    def unload(self, name: str) -> None:
        """Unload the model after its requests, even if the model is pinned."""
        model = self._models[name]
        if model.state == "loaded":
            model.leaving = model.to_unload = True

    def resize(self, name: str, n_bytes: int, weights: Weights | None = None) -> None:
        """Change the bytes of an unloaded model. Raises InvalidRequestError if the model does not
        fit beside the pinned models."""
        model = self._models[name]
        if model.state == "unloaded":
            model.n_bytes = n_bytes
            self._weigh(model, weights)
            self._require_fits(model)

    def limit(self, capacity: int) -> None:
        """Limit all models together to `capacity` bytes. Loaded models stay until another model
        needs memory."""
        self.capacity = min(self._most, capacity)

    def room_for(self, name: str) -> int:
        """Return the maximum number of bytes that the model's weights may need."""
        others = (one for one in self._present() if one.name != name)
        return self.capacity - _bytes_of(others) - self._models[name].n_bytes

    def changing(self, change: Change) -> None:
        self._models[change.name].state = "loading" if change.loads else "unloading"

    def loaded(self, name: str, now: float, seconds: float, weights: Weights | None = None) -> None:
        """Record a load that took `seconds`."""
        model = self._models[name]
        self._weigh(model, weights or model.weights)
        model.state, model.load_seconds = "loaded", seconds
        model.loaded_at = model.last_used = now
        model.leaving = model.to_unload = False

    def unloaded(self, name: str) -> None:
        """Record that the model has unloaded or failed to load."""
        model = self._models[name]
        model.state, model.leaving, model.to_unload = "unloaded", False, False

    def failed(self, name: str) -> None:
        """Record that the model failed to load, and drop its waiting requests."""
        self.unloaded(name)
        self._models[name].tickets.clear()

    # Decisions

    def next_change(self, now: float) -> Change | None:
        """Return the next change; None during a change."""
        for model in self._loaded():
            expires = model.expires()
            is_old = expires is not None and expires <= now
            if (is_old or model.to_unload) and model.is_idle:
                return Change(model.name, loads=False)
        wanted = self._wanted()
        victims = [] if wanted is None else self._victims(wanted)
        for model in self._loaded():
            full = model in victims and model.gives_way(self._patience) <= now
            model.leaving = model.to_unload or full
        if wanted is None:
            return None
        if not victims:
            return Change(wanted.name, loads=True)
        if all(one.leaving and one.is_idle for one in victims):
            return Change(victims[0].name, loads=False)
        return None

    def next_time(self, now: float) -> float | None:
        """Return the time of the next change without another event, or None."""
        times = [expires for one in self._loaded() if (expires := one.expires()) is not None]
        wanted = self._wanted()
        if wanted is not None:
            times += [one.gives_way(self._patience) for one in self._victims(wanted)]
        return min((one for one in times if one > now), default=None)

    # Inside

    def _loaded(self) -> Iterator[_Model]:
        return (one for one in self._models.values() if one.state == "loaded")

    def _present(self) -> Iterator[_Model]:
        return (one for one in self._models.values() if one.state != "unloaded")

    def _fit(self, models: Iterable[_Model]) -> bool:
        return _bytes_of(models) <= self.capacity

    def _wanted(self) -> _Model | None:
        """Return the model whose request has waited longest."""
        waiting = [one for one in self._models.values() if one.state == "unloaded" and one.tickets]
        return min(waiting, key=lambda one: one.tickets[0].since, default=None)

    def _victims(self, wanted: _Model) -> list[_Model]:
        # Idle models first, and only as many as necessary
        stay = [wanted, *self._present()]
        chosen: list[_Model] = []
        others = [one for one in self._loaded() if not one.pinned or one.to_unload]
        for one in sorted(others, key=lambda one: (not one.is_idle, one.last_used)):
            if self._fit(stay):
                break
            chosen.append(one)
            stay.remove(one)
        for one in tuple(chosen):
            if self._fit((*stay, one)):
                chosen.remove(one)
                stay.append(one)
        return chosen

    def _weigh(self, model: _Model, weights: Weights | None) -> None:
        model.weights = weights
        for one in self._models.values():
            if weights is not None and one.weights is not None and one.weights.key == weights.key:
                one.weights = weights

    def _require_fits(self, model: _Model) -> None:
        pinned = [one for one in self._models.values() if one.pinned and one is not model]
        if self._fit((*pinned, model)):
            return
        stays = _bytes_of(pinned)
        needed = _bytes_of((*pinned, model)) - stays
        beside = f" next to {stays // _MIB} MiB of pinned models" if pinned else ""
        raise InvalidRequestError(
            f"{model.name} needs {needed // _MIB} MiB for its weights and its pool"
            f"{beside}: expected at most the {self.capacity // _MIB} MiB of the budget for models"
        )


def _bytes_of(models: Iterable[_Model]) -> int:
    found = tuple(models)
    shared = {one.weights for one in found if one.weights is not None}
    return sum(one.n_bytes for one in found) + sum(one.n_bytes for one in shared)
