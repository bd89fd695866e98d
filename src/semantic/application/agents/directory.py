"""AgentDirectory: lists, describes, forks, pins and deletes the agents of one model.

Methods with an `engine` parameter run on the engine's thread; other methods may run on any thread.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from typing import TypeAlias

from semantic.application.agents import branches
from semantic.application.agents.footprint import (
    AgentFootprint,
    Chains,
    agent_block,
    footprints,
    place_of,
    walk,
)
from semantic.application.cache.agent_notes import parent_after, parent_of, session_and_client_in
from semantic.application.engine.batch_engine import BlockPoolBatchEngine
from semantic.application.request import Phase, Request
from semantic.domain.block_hash import Scope, tenant_id, tenant_tag
from semantic.domain.errors import (
    AgentNotFoundError,
    InvalidRequestError,
    PinLimitError,
    StoreError,
)
from semantic.domain.stored import Manifest, StoreStats
from semantic.ports.agents import (
    EVERY_AGENT,
    AgentDetail,
    AgentFilter,
    AgentState,
    AgentSummary,
    Branch,
    Checkpoints,
    RequestState,
    RunningRequest,
    Tenant,
    TenantId,
)
from semantic.ports.store import StorePort

_LOOKED = 200
"""The maximum number of saved agents to read for a page."""

Owner: TypeAlias = str | bytes
"""A tenant's name, or its tag if the engine does not know the name."""


@dataclass(frozen=True, slots=True)
class Activity:
    """The state of an agent in the engine at one moment."""

    state: AgentState = "idle"
    tokens: int = 0
    pool_tokens: int = 0
    pool_bytes: int = 0
    note: str = ""


class AgentDirectory:
    """Lists and changes the agents of one model, for one tenant per call."""

    def __init__(self, store: StorePort, durable: StorePort, namespace: bytes, model: str) -> None:
        """`durable` is the most durable tier of `store`. `namespace` identifies the model's
        content, and `model` is the model's name."""
        self._store = store
        self._durable = durable.agents
        self._agents = store.agents
        self._namespace = namespace
        self._model = model
        self._lock = threading.Lock()  # guards `_chains`
        self._chains = Chains()

    # On the engine's thread

    def owner(self, engine: BlockPoolBatchEngine, tenant: Tenant) -> Owner:
        """Return the name of `tenant`, or its tag if the name is unknown. Raises
        AgentNotFoundError."""
        if isinstance(tenant, str):
            return tenant
        owners = self.owners(engine)
        if tenant not in owners:
            raise AgentNotFoundError(f"tenant {tenant.id!r:.80} has no agents")
        return owners[tenant]

    def owners(self, engine: BlockPoolBatchEngine) -> dict[TenantId, Owner]:
        """Return the owner of the agents for each tenant id."""
        secret = self._store.secret
        names = {request.tenant for request in engine.requests if request.keep}
        names |= {key.tenant for key in engine.idle_caches.lru_order()}
        found: dict[bytes, Owner] = {
            scope.tenant: scope.tenant
            for scope in self._agents.scopes()
            if scope.namespace == self._namespace
        }
        found |= {tenant_tag(secret, name): name for name in names}
        return {TenantId(tenant_id(secret, tag)): owner for tag, owner in found.items()}

    def activity(
        self, engine: BlockPoolBatchEngine, tenant: Owner, names: Collection[str] | None = None
    ) -> dict[str, Activity]:
        """Return the activity of each agent that has a request or is in `names`."""
        pool, found = engine.pool, dict[str, Activity]()
        if isinstance(tenant, bytes):
            return found
        for cache in engine.caches_of(tenant, names):
            n_tokens, n_bytes = cache.total_tokens, pool.view(cache.owner).n_bytes
            found[cache.agent_id] = Activity("idle", n_tokens, n_tokens, n_bytes)
        for request in engine.requests:
            if request.tenant == tenant and request.keep:
                held = pool.view(request.owner).n_bytes
                found[request.agent_id] = Activity(
                    _state(request), request.n_tokens, 0, held, request.note
                )
        return found

    def requests(self, engine: BlockPoolBatchEngine, tenant: Owner | None) -> list[RunningRequest]:
        chosen = [one for one in engine.requests if tenant is None or one.tenant == tenant]
        ids = {name: self.id_of(name) for name in {one.tenant for one in chosen}}
        return [
            RunningRequest(
                one.uid,
                one.agent_id,
                ids[one.tenant],
                _state(one),
                len(one.prompt),
                min(one.computed, len(one.prompt)),
                one.cached_tokens,
                len(one.generated),
                engine.seconds_of(one),
                one.preemptions,
                self._model,
            )
            for one in sorted(chosen, key=lambda one: one.number)
        ]

    def cancel(self, engine: BlockPoolBatchEngine, uid: str, tenant: Owner | None) -> bool:
        owners = (one.tenant for one in engine.requests if one.uid == uid)
        found = next(owners, None)
        return found is not None and tenant in {None, found} and engine.cancel(uid)

    def fork(
        self, engine: BlockPoolBatchEngine, branch: Branch, new_ids: Sequence[str], tenant: str
    ) -> None:
        """See `AgentsPort.fork`."""
        branches.require_new(new_ids)
        agent_id = branch.agent_id
        seen = self.activity(engine, tenant, (agent_id, *new_ids))
        for new_id in new_ids:
            if new_id in seen or self.is_saved(new_id, tenant):
                raise InvalidRequestError(f"new_id: agent {new_id!r} already exists")
        source = None
        if branch.checkpoint is not None or branch.turn is not None:
            source = self.history(branch, tenant)
        elif not _is_idle(agent_id, seen) and not self.is_saved(agent_id, tenant):
            self._require(agent_id, tenant, seen)
            raise InvalidRequestError(f"agent {agent_id!r} has not finished its first turn yet")
        for new_id in new_ids:
            engine.fork(agent_id, new_id, tenant=tenant, history=source)
        engine.expect(new_ids[0], 0, tenant=tenant)

    def restore(self, engine: BlockPoolBatchEngine, agent_id: str, name: str, tenant: str) -> None:
        """See `AgentsPort.restore`."""
        saved = branches.find_checkpoint(self._agents, self.scope(tenant), agent_id, name)
        self._require_idle(agent_id, self.activity(engine, tenant, (agent_id,)))
        before = self._agents.manifest(self.scope(tenant), agent_id)
        engine.restore(branches.continued(saved, agent_id, before), tenant=tenant)

    def pin(
        self, engine: BlockPoolBatchEngine, agent_id: str, tenant: Owner, *, pinned: bool
    ) -> None:
        """See `AgentsPort.pin`. Raises StoreError."""
        self._require(agent_id, tenant, self.activity(engine, tenant, (agent_id,)))
        saved = self._agents.manifest(self.scope(tenant), agent_id)
        if saved is None:
            raise InvalidRequestError(f"cannot pin agent {agent_id!r}: it is not in the store yet")
        if saved.pinned != pinned and not self._agents.save(replace(saved, pinned=pinned)):
            raise StoreError(f"cannot save agent {agent_id!r}: the store refused it")

    def forget(
        self, engine: BlockPoolBatchEngine, agent_id: str, tenant: Owner, *, with_family: bool
    ) -> list[str]:
        """See `AgentsPort.forget`."""
        seen = self.activity(engine, tenant, None if with_family else (agent_id,))
        scope, names = self.scope(tenant), [agent_id]
        if with_family:
            names = [name for name, _ in self._related(agent_id, tenant, seen)]
        if not branches.names_of_checkpoints(self._agents, scope, agent_id):
            self._require(agent_id, tenant, seen)
        for name in names:
            self._require_idle(name, seen)
        for name in names:
            branches.remove_checkpoints(self._agents, scope, name)
            if isinstance(tenant, bytes):
                self._agents.remove(scope, name)
            else:
                engine.forget(name, tenant=tenant)
        return names

    def _require_idle(self, agent_id: str, seen: Mapping[str, Activity]) -> None:
        if agent_id in seen and not _is_idle(agent_id, seen):
            raise InvalidRequestError(f"agent {agent_id!r} has a request: wait until it finishes")

    def _require(self, agent_id: str, tenant: Owner, seen: Mapping[str, Activity]) -> None:
        if agent_id not in seen and not self.is_saved(agent_id, tenant):
            raise _unknown(agent_id)

    # On any thread

    def id_of(self, tenant: str) -> TenantId:
        secret = self._store.secret
        return TenantId(tenant_id(secret, tenant_tag(secret, tenant)))

    def scope(self, tenant: Owner) -> Scope:
        """Return the scope of the tenant's agents."""
        tag = tenant if isinstance(tenant, bytes) else tenant_tag(self._store.secret, tenant)
        return Scope(self._namespace, tag)

    def is_saved(self, agent_id: str, tenant: Owner) -> bool:
        """Return whether the tenant has a saved agent called `agent_id`."""
        return self._agents.manifest(self.scope(tenant), agent_id) is not None

    def saved_agent(self, agent_id: str, tenant: Owner) -> Manifest:
        """Return the manifest of a saved agent's last turn, or raise AgentNotFoundError."""
        saved = self._agents.manifest(self.scope(tenant), agent_id)
        if saved is None:
            raise AgentNotFoundError(f"there is no saved agent {agent_id!r:.300}")
        return saved

    def history(self, branch: Branch, tenant: Owner) -> Manifest:
        """Return the history at which a branch begins. Raises the same errors as `history_at`."""
        latest = partial(self.saved_agent, branch.agent_id, tenant)
        return branches.history_at(self._agents, self.scope(tenant), branch, latest)

    def checkpoint(
        self, branch: Branch, name: str, tenant: str, now: float, *, pinned: bool
    ) -> AgentSummary:
        """See `AgentsPort.checkpoint`. Raises PinLimitError and StoreError."""
        saved = branches.checkpoint(self.history(branch, tenant), name, now)
        if self.is_saved(saved.agent_id, tenant):
            raise InvalidRequestError(
                f"name: agent {branch.agent_id!r:.80} has a checkpoint {name!r} already"
            )
        if pinned:
            self._require_pinnable(saved)
        self._agents.save(replace(saved, pinned=pinned))
        self._store.flush()
        if self._durable.manifest(saved.scope, saved.agent_id) is None:
            self._agents.remove(saved.scope, saved.agent_id)
            raise StoreError(
                f"cannot keep checkpoint {name!r:.80}: the store dropped it; `semantic doctor` "
                "checks the store"
            )
        return self._checkpoints([replace(saved, pinned=pinned)])[0]

    def checkpoints(
        self, agent_id: str, tenant: Owner, seen: Mapping[str, Activity]
    ) -> Checkpoints:
        """See `AgentsPort.checkpoints`."""
        scope = self.scope(tenant)
        saved = branches.checkpoints(self._agents, scope, agent_id)
        agent = self._agents.manifest(scope, agent_id)
        if not saved and agent is None and agent_id not in seen:
            raise _unknown(agent_id)
        turns = () if agent is None else agent.turn_ends
        return Checkpoints(tuple(self._checkpoints(saved)), turns)

    def delete_checkpoint(self, agent_id: str, name: str, tenant: Owner) -> None:
        """See `AgentsPort.delete_checkpoint`."""
        found = branches.find_checkpoint(self._agents, self.scope(tenant), agent_id, name)
        self._agents.remove(found.scope, found.agent_id)

    def family(
        self, agent_id: str, tenant: Owner, seen: Mapping[str, Activity]
    ) -> list[tuple[AgentSummary, int]]:
        """See `AgentsPort.family`."""
        depths = dict(self._related(agent_id, tenant, seen))
        found = self.summaries(list(depths), tenant, seen)
        return [(one, depths[one.id]) for one in found]

    def summaries(
        self, names: Sequence[str], tenant: Owner, seen: Mapping[str, Activity]
    ) -> list[AgentSummary]:
        """Return the summaries of agents, in order. Raises AgentNotFoundError."""
        scope = self.scope(tenant)
        saved = [one for name in names if (one := self._agents.manifest(scope, name)) is not None]
        found = {one.id: one for one in self._summaries(saved, seen)}
        for name in names:
            if name not in found and name not in seen:
                raise _unknown(name)
        ordered = (found.get(name) or self._unsaved(name, seen[name]) for name in names)
        return [replace(one, children=self._children(one.id, tenant, seen)) for one in ordered]

    def _related(
        self, agent_id: str, tenant: Owner, seen: Mapping[str, Activity]
    ) -> Iterator[tuple[str, int]]:
        return branches.family(lambda name: self._children(name, tenant, seen), agent_id)

    def require_pinnable(self, agent_id: str, tenant: Owner) -> None:
        """Raise PinLimitError if the tenant's pins would exceed the tenant's part of the store."""
        saved = self._agents.manifest(self.scope(tenant), agent_id)
        if saved is not None:
            self._require_pinnable(saved)

    def _require_pinnable(self, saved: Manifest) -> None:
        name = branches.shown_name(saved.agent_id)
        part = self._agents.pinned(saved.scope.tenant)
        if saved.pinned or part.max_bytes is None:
            return
        (footprint,) = self._footprints([saved])
        if part.n_bytes + footprint.n_bytes > part.max_bytes:
            raise PinLimitError(
                f"cannot pin agent {name!r:.300} of {footprint.n_bytes} bytes: you have pinned "
                f"{part.n_bytes} of at most {part.max_bytes} bytes; unpin another agent"
            )

    def stores(self) -> Sequence[StoreStats]:
        """Return the statistics of each tier of the store."""
        return self._store.stats()

    def saved(
        self,
        tenant: Owner,
        limit: int,
        after: str | None = None,
        only: AgentFilter = EVERY_AGENT,
        seen: Mapping[str, Activity] | None = None,
    ) -> tuple[Sequence[Manifest], bool, str | None]:
        """Return a page of saved agents, last saved first. Also returns whether more agents
        follow, and the last agent's name. Raises AgentNotFoundError if `after` is not saved."""
        scope, last = self.scope(tenant), None
        if after is not None:
            before = self._agents.manifest(scope, after)
            if before is None:
                raise _unknown(after)
            last = before.place
        idle, states = Activity(), seen or {}
        walked = walk(self._agents, scope, limit + 1, last)
        if only.state not in {None, idle.state}:
            names = [name for name, one in states.items() if one.state == only.state]
            busy = self._saved_of(scope, names)
            walked = (one for one in busy if last is None or one.place < last)
        found = list[Manifest]()
        for one in islice(walked, max(limit, _LOOKED)):
            state = states.get(one.agent_id, idle).state
            is_agent = not branches.is_checkpoint(one.agent_id)
            if is_agent and only.accepts(one.agent_id, state, parent_of(one), pinned=one.pinned):
                if len(found) == limit:
                    return found, True, found[-1].agent_id
                found.append(one)
            after = one.agent_id
        return found, next(walked, None) is not None, after

    def _saved_of(self, scope: Scope, names: Collection[str]) -> list[Manifest]:
        saved = [one for name in names if (one := self._agents.manifest(scope, name)) is not None]
        return sorted(saved, key=lambda one: one.place, reverse=True)

    def page(
        self,
        tenant: Owner,
        saved: Sequence[Manifest],
        seen: Mapping[str, Activity],
        *,
        is_first: bool,
        only: AgentFilter = EVERY_AGENT,
    ) -> list[AgentSummary]:
        """Return the summaries of the agents `saved`. The first page adds the unsaved agents."""
        scope, names = self.scope(tenant), {one.agent_id for one in saved}
        new = [
            self._unsaved(name, one)
            for name, one in (seen.items() if is_first else ())
            if name not in names and self._agents.manifest(scope, name) is None
        ]
        found = [*filter(partial(_is_one, only), new), *self._summaries(saved, seen)]
        return [replace(one, children=self._children(one.id, tenant, seen)) for one in found]

    def show(self, agent_id: str, tenant: Owner, seen: Mapping[str, Activity]) -> AgentDetail:
        """See `AgentsPort.show`."""
        manifest = self._agents.manifest(self.scope(tenant), agent_id)
        activity = seen.get(agent_id)
        children = self._children(agent_id, tenant, seen)
        if manifest is None:
            if activity is None:
                raise _unknown(agent_id)
            summary = self._unsaved(agent_id, activity)
            return AgentDetail(replace(summary, children=children), (), None)
        (footprint,) = self._footprints([manifest])
        activity = activity or Activity()
        blocks = tuple(
            agent_block(footprint, block, activity.pool_tokens) for block in footprint.chain
        )
        summary = self._summary(footprint, activity)
        return AgentDetail(replace(summary, children=children), blocks, manifest.match)

    def _children(
        self, agent_id: str, tenant: Owner, seen: Mapping[str, Activity]
    ) -> tuple[str, ...]:
        saved = self._agents.child_agents(self.scope(tenant), agent_id)
        saved = [name for name in saved if not branches.is_checkpoint(name)]
        asking = (name for name, one in seen.items() if parent_after(None, one.note) == agent_id)
        return tuple(sorted({*saved, *asking}))

    def _checkpoints(self, saved: Sequence[Manifest]) -> list[AgentSummary]:
        return [replace(one, id=branches.shown_name(one.id)) for one in self._summaries(saved, {})]

    def _footprints(self, manifests: Sequence[Manifest]) -> list[AgentFootprint]:
        with self._lock:
            return footprints(self._store, manifests, self._chains.of)

    def _summaries(
        self, manifests: Sequence[Manifest], seen: Mapping[str, Activity]
    ) -> list[AgentSummary]:
        return [
            self._summary(one, seen.get(one.manifest.agent_id, Activity()))
            for one in self._footprints(manifests)
        ]

    def _summary(self, footprint: AgentFootprint, activity: Activity) -> AgentSummary:
        manifest = footprint.manifest
        saved = replace(activity, tokens=len(manifest.token_ids), note=manifest.note)
        in_pool = activity.pool_tokens
        return replace(
            self._unsaved(manifest.agent_id, saved),
            blocks=Counter(place_of(footprint, one, in_pool) for one in footprint.chain),
            n_bytes=footprint.n_bytes,
            shared_bytes=footprint.shared_bytes,
            pinned=manifest.pinned,
            turns=manifest.turns,
            parent=parent_of(manifest),
            last_used=manifest.saved_at,
            match=manifest.match,
        )

    def _unsaved(self, agent_id: str, activity: Activity) -> AgentSummary:
        session, client = session_and_client_in(activity.note)
        return AgentSummary(
            id=agent_id,
            model=self._model,
            state=activity.state,
            tokens=activity.tokens,
            blocks={},
            n_bytes=0,
            shared_bytes=0,
            pool_bytes=activity.pool_bytes,
            pinned=False,
            turns=0,
            parent=parent_after(None, activity.note),
            session=session,
            client=client,
        )


def _is_one(only: AgentFilter, one: AgentSummary) -> bool:
    return only.accepts(one.id, one.state, one.parent, pinned=one.pinned)


def _unknown(agent_id: str) -> AgentNotFoundError:
    return AgentNotFoundError(f"there is no agent {agent_id!r:.300}")


def _is_idle(agent_id: str, seen: Mapping[str, Activity]) -> bool:
    return agent_id in seen and seen[agent_id].state == "idle"


_STATES: Mapping[Phase, RequestState] = {Phase.PREFILL: "prefill", Phase.DECODE: "decode"}


def _state(request: Request) -> RequestState:
    if request.phase is Phase.LOAD:
        return "prefill"
    return _STATES.get(request.phase, "queued")
