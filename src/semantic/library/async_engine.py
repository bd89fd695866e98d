"""`AsyncEngine`: a model and its agents for programs with an event loop."""

from __future__ import annotations

import asyncio
import atexit
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Final, Literal, Self, Unpack, overload

from semantic.application.engine.admission import QueueLimits
from semantic.application.serving import Serving
from semantic.bootstrap import OnStoreUnavailable
from semantic.composition.engine_settings import DEFAULT_MODEL, Settings
from semantic.composition.named_models import model_name, model_of, named_adapter
from semantic.domain.block_hash import LOCAL_TENANT
from semantic.domain.chat import Chat, Message
from semantic.domain.errors import BackendError, InvalidRequestError
from semantic.domain.stored import StoreStats
from semantic.library.answers import Answer, AsyncAnswerStream
from semantic.library.async_agent import AsyncAgent, read_archive
from semantic.library.chat_options import ChatOptions, Messages, Request, conversation
from semantic.ports.agents import AgentSummary
from semantic.ports.serving import ServedModel
from semantic.serve import ServeSettings, adapted
from semantic.serve_models import ResidentModels, load_resident

_ALL_AGENTS: Final = 1 << 40
"""A number of agents that exceeds the number in any store."""


class AsyncEngine:
    """A model that computes no agent's tokens twice, for programs with an event loop.

        async with AsyncEngine() as engine:
            answer = await engine.chat("ada", "My name is Ada.")
            async for text in await engine.chat("ada", "What is my name?", stream=True):
                print(text, end="")

    Use an engine on one event loop. Any number of tasks may call its methods. See `Engine` for the
    methods.
    """

    def __init__(
        self,
        model: str | Settings = DEFAULT_MODEL,
        *,
        store: str | Path | bool = False,
        max_context: int | None = None,
        on_store_unavailable: OnStoreUnavailable | None = None,
        adapters: Mapping[str, str | Path] | None = None,
    ) -> None:
        """See `Engine` for the arguments. `async with` or `start` loads the model. Raises
        InvalidRequestError for an invalid adapter name, and for arguments that contradict
        `Settings`."""
        self._settings = serve_settings(model, store, max_context, adapters or {})
        self._on_store_unavailable = on_store_unavailable
        self._loaded: ResidentModels | None = None
        self._agents: defaultdict[int, dict[str, AsyncAgent]] = defaultdict(dict)
        self._changing = asyncio.Lock()

    # Life

    async def start(self) -> None:
        """Load the model. Returns once the model can answer. Raises ModelNotFoundError,
        UnsupportedModelError, StoreError, and OperatorError if MLX is not usable."""
        async with self._changing:
            if self._loaded is None:
                self._loaded = await load_resident(self._settings, self._on_store_unavailable)
                atexit.register(self._loaded.end)  # for a program that forgets `close`

    async def flush(self) -> None:
        await self._models.flush()

    async def close(self) -> None:
        async with self._changing:
            loaded, self._loaded = self._loaded, None
            self._agents.clear()
            if loaded is not None:
                atexit.unregister(loaded.end)
                await loaded.close()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *failure: object) -> None:
        await self.close()

    @property
    def is_loaded(self) -> bool:
        """True after `start` has ended and until `close` begins."""
        return self._loaded is not None

    @property
    def model(self) -> ServedModel:
        return self._serving().model

    @property
    def models(self) -> Sequence[ServedModel]:
        return [one.model for one in self._models.servings]

    # Answers

    @overload
    async def chat(
        self,
        agent: str,
        messages: Messages,
        *,
        stream: Literal[False] = ...,
        model: str | None = None,
        **options: Unpack[ChatOptions],
    ) -> Answer: ...

    @overload
    async def chat(
        self,
        agent: str,
        messages: Messages,
        *,
        stream: Literal[True],
        model: str | None = None,
        **options: Unpack[ChatOptions],
    ) -> AsyncAnswerStream: ...

    async def chat(
        self,
        agent: str,
        messages: Messages,
        *,
        stream: bool = False,
        model: str | None = None,
        **options: Unpack[ChatOptions],
    ) -> Answer | AsyncAnswerStream:
        asked = self.agent(agent, model=model)
        if stream:
            return await asked.chat(messages, stream=True, **options)
        return await asked.chat(messages, **options)

    async def run_batch(
        self, requests: Iterable[tuple[str, Messages] | Request], **options: Unpack[ChatOptions]
    ) -> list[Answer]:
        batch = [one if isinstance(one, Request) else Request(*one) for one in requests]
        asked = [self.agent(one.agent, model=one.model) for one in batch]
        _require_different(asked)
        answers = await asyncio.gather(
            *(
                _answer(agent, one.messages, {**options, **one.options})
                for agent, one in zip(asked, batch, strict=True)
            ),
            return_exceptions=True,
        )
        failed = [one for one in answers if isinstance(one, BaseException)]
        if failed:
            raise failed[0]
        return [one for one in answers if isinstance(one, Answer)]

    async def count_tokens(self, messages: Messages) -> int:
        asked = (
            (Message("user", messages),) if isinstance(messages, str) else conversation(messages)
        )
        return len(await self._serving().tokenize(Chat(asked)))

    # Agents

    def agent(
        self, name: str, *, system: str | None = None, model: str | None = None
    ) -> AsyncAgent:
        number = 0 if model is None else self._models.number(model)
        agents = self._agents[number]
        if name not in agents:
            agents[name] = AsyncAgent(name, lambda: self._models.servings[number], agents)
        if system is not None:
            agents[name].begin(system)
        return agents[name]

    async def agents(self, model: str | None = None) -> Sequence[AgentSummary]:
        page = await self._serving(model).agents.page(LOCAL_TENANT, _ALL_AGENTS)
        return sorted(page.agents, key=lambda one: (one.state == "idle", -(one.last_used or 0.0)))

    def stores(self) -> Sequence[StoreStats]:
        return self._serving().agents.stores()

    async def import_agent(
        self, path: str | Path, name: str | None = None, *, model: str | None = None
    ) -> AsyncAgent:
        async with aclosing(read_archive(Path(path))) as pieces:
            imported = await self._serving(model).agents.import_(pieces, LOCAL_TENANT, name)
        return self.agent(imported.id, model=model)

    # Inside

    @property
    def _models(self) -> ResidentModels:
        if self._loaded is None:
            raise BackendError("the engine is not loaded: use it within `with`")
        return self._loaded

    def _serving(self, model: str | None = None) -> Serving:
        return self._models.servings[self._models.number(model)]


def serve_settings(
    model: str | Settings,
    store: str | Path | bool,
    max_context: int | None,
    adapters: Mapping[str, str | Path],
) -> list[ServeSettings]:
    """Return the arguments of `AsyncEngine` as settings. Any number of requests may wait."""
    if isinstance(model, Settings) and store is not False:
        raise InvalidRequestError("expected Settings or a store, got both")
    if isinstance(model, str):
        folder = None if isinstance(store, bool) else Path(store)
        model = Settings(model_of(model), use_disk=store is not False, store=folder)
    if adapters and model.adapter is not None:
        raise InvalidRequestError("expected Settings with an adapter or adapters, got both")
    names = (model_name(model.model),) if adapters else ()
    limits = QueueLimits(sys.maxsize, sys.maxsize)
    base = ServeSettings(model, names, max_context=max_context, limits=limits)
    return [base, *(adapted(base, named_adapter(*one)) for one in adapters.items())]


async def _answer(agent: AsyncAgent, messages: Messages, options: ChatOptions) -> Answer:
    return await agent.chat(messages, **options)


def _require_different(batch: Sequence[AsyncAgent]) -> None:
    seen: set[AsyncAgent] = set()
    for one in batch:
        if one in seen:
            raise InvalidRequestError(
                f"agent {one.name!r:.80} has two requests in one batch: expected one turn each"
            )
        seen.add(one)
