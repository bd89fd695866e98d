"""What a request for several choices is: that many answers, which run together.

Each is told from the others by its index. If one fails all of them end. Knows no wire's format.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from typing import Final

from anyio import CancelScope

from semantic.adapters.http.errors import FieldError
from semantic.adapters.http.openai.caller import Caller
from semantic.adapters.http.openai.sampling import for_choice
from semantic.domain.answer import AnswerEvent, AnswerStarted
from semantic.domain.value_objects import SamplingParams
from semantic.ports.serving import Ask, Prompt, ServingPort

MOST_CHOICES: Final = 128
"""Answers that one request may ask for, over all its prompts."""

IndexedEvent = tuple[int, AnswerEvent]


def number_of_choices(n: int | None, n_prompts: int = 1) -> int:
    """The choices for each prompt. Raises FieldError unless all of them together are allowed."""
    n = 1 if n is None else n
    if n_prompts > MOST_CHOICES:
        raise FieldError(
            f"prompt: expected {MOST_CHOICES} prompts at most, got {n_prompts}", param="prompt"
        )
    if n < 1 or n * n_prompts > MOST_CHOICES:
        each = "" if n_prompts == 1 else f" for {n_prompts} prompts"
        most = MOST_CHOICES // n_prompts
        raise FieldError(f"n must be between 1 and {most}{each}, got {n}", param="n")
    return n


def asks_for(
    prompts: Sequence[Prompt],
    n: int,
    sampling: SamplingParams,
    max_tokens: int | None,
    caller: Caller,
) -> tuple[Ask, ...]:
    """An ask for each choice of each prompt, in the order of their indices.

    The first choice is the agent's own; the others have names of their own, so that they do not
    overwrite the history that the agent goes on from.
    """
    return tuple(
        Ask(
            prompt,
            for_choice(sampling, choice),
            max_tokens,
            agent=_agent_name(caller.agent, number * n + choice),
            tenant=caller.tenant,
            identity=caller.identity,
        )
        for number, prompt in enumerate(prompts)
        for choice in range(n)
    )


async def together(serving: ServingPort, asks: Sequence[Ask]) -> AsyncGenerator[IndexedEvent, None]:
    """The events of all answers as they come, each with its answer's index.

    The first comes when every answer has begun, so what `ServingPort.answer` raises is raised
    before it. Closing this cancels all that still run.
    """
    answers = [serving.answer(ask) for ask in asks]
    waiting: dict[asyncio.Task[AnswerEvent | None], int] = {}
    held: list[IndexedEvent] = []
    unstarted = len(answers)
    try:
        for index, answer in enumerate(answers):
            waiting[asyncio.create_task(_next(answer))] = index
        while waiting:
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for task in sorted(done, key=waiting.__getitem__):
                event, index = task.result(), waiting.pop(task)
                if event is None:
                    continue
                waiting[asyncio.create_task(_next(answers[index]))] = index
                unstarted -= isinstance(event, AnswerStarted)
                held.append((index, event))
            if unstarted:
                continue
            for one in held:
                yield one
            held.clear()
    finally:
        # Shielded: the scope around a response that nobody reads any more is cancelled.
        with CancelScope(shield=True):
            await _end(waiting, answers)


async def _next(answer: AsyncGenerator[AnswerEvent, None]) -> AnswerEvent | None:
    """The next event; None after the last one."""
    return await anext(answer, None)


async def _end(
    waiting: dict[asyncio.Task[AnswerEvent | None], int],
    answers: Sequence[AsyncGenerator[AnswerEvent, None]],
) -> None:
    for task in waiting:
        task.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)
    for answer in answers:
        await answer.aclose()


def _agent_name(agent: str | None, index: int) -> str | None:
    return agent if agent is None or index == 0 else f"{agent}/{index + 1}"
