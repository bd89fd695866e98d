"""Agents' traffic by templates that write history anew: nearly all of it is in the cache.

Every answer is the one that an engine without any cache gives for the same tokens.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from semantic.application.chat.answer_reader import AnswerMessage
from semantic.composition.engine_settings import Settings
from semantic.domain.answer import AnswerEnd, AnswerStarted, PromptProgress, PromptScored, TextDelta
from semantic.domain.chat import Chat, Message, Tool, ToolChoice
from semantic.domain.value_objects import SamplingParams
from semantic.ports.serving import Ask
from semantic.serve import ServeSettings, load_serving
from tests.support.lanes import examples, more
from tests.support.model_folder import write_model

pytestmark = pytest.mark.process

GREEDY = SamplingParams()
BLOCK = 256
PICK = Tool(
    "pick",
    "Picks one.",
    {
        "type": "object",
        "properties": {"which": {"enum": ["a", "b"]}},
        "required": ["which"],
        "additionalProperties": False,
    },
    strict=True,
)
MAX_TOKENS = 12
MAX_CALL_TOKENS = 80
CHECKED = 3
"""Answers at the end of a test that are computed again without a cache."""

Run = Callable[[Callable[["Served"], Awaitable[None]]], None]


def words(n: int, seed: str) -> str:
    """A text of `n` words."""
    draw = random.Random(seed)
    return " ".join("".join(draw.choices("abcdefghijklmno", k=3)) for _ in range(n))


@dataclass
class Turn:
    """One request that was answered: its prompt, what was cached of it, and the answer."""

    prompt: tuple[int, ...]
    cached: int
    answer: Message
    max_tokens: int


@dataclass
class Talk:
    """One agent's client: it sends all messages every time, thoughts left out."""

    serving: Served
    messages: list[Message] = field(default_factory=list)
    tools: tuple[Tool, ...] = ()
    agent: str | None = None
    turns: list[Turn] = field(default_factory=list)

    async def say(self, *messages: Message, choice: ToolChoice | None = None) -> Turn:
        """Send `messages` behind all others and take the answer in."""
        self.messages += messages
        chat = Chat(
            tuple(self.messages),
            self.tools,
            choice or ToolChoice(),
            parallel_tool_calls=False,
            template_options={"enable_thinking": False} if self.tools else {},
        )
        turn = await self.serving.answer(chat, self.agent)
        self.turns.append(turn)
        self.messages.append(replace(turn.answer, reasoning=""))
        return turn

    async def use_tool(self, number: int) -> Turn:
        """Ask for a call of a tool, and answer it."""
        turn = await self.say(choice=ToolChoice("required", "pick"))
        call = turn.answer.tool_calls[-1]
        self.messages.append(Message("tool", words(10, f"result {number}"), tool_call_id=call.id))
        return turn


@dataclass
class Served:
    """A model that is served from `folder`, and may be stopped and started again."""

    folder: Path | str
    store: Path
    use_disk: bool = True
    turns: list[Turn] = field(default_factory=list)

    async def start(self) -> None:
        settings = Settings(
            model=str(self.folder), pool_blocks=4000, use_disk=self.use_disk, store=self.store
        )
        self.serving = await load_serving(ServeSettings(settings))

    async def restart(self) -> None:
        await self.serving.close()
        await self.start()

    async def answer(
        self, chat: Chat, agent: str | None = None, max_tokens: int = MAX_TOKENS
    ) -> Turn:
        max_tokens = MAX_CALL_TOKENS if chat.tools else MAX_TOKENS
        ask = Ask(chat, GREEDY, max_tokens, agent)
        prompt = await self.serving.tokenize(chat)
        said = AnswerMessage()
        async for event in self.serving.answer(ask):
            match event:
                case AnswerEnd():
                    assert event.reason in ("stop", "length", "tool_calls"), event
                    assert event.usage.prompt == len(prompt)
                    turn = Turn(prompt, event.usage.cached, said.message, max_tokens)
                case AnswerStarted() | PromptProgress() | PromptScored():
                    pass
                case _:
                    said.add(event)
        self.turns.append(turn)
        return turn


def share(turns: Sequence[Turn]) -> float:
    """The cached share of the prompt tokens of `turns`."""
    return sum(turn.cached for turn in turns) / sum(len(turn.prompt) for turn in turns)


def require_warm(talk: Talk) -> None:
    """From its second turn on nearly all that a client sent was cached."""
    assert share(talk.turns[1:]) >= 0.95
    for before, after in zip(talk.turns, talk.turns[1:], strict=False):
        assert after.prompt[: len(before.prompt)] == before.prompt


def squeezed(text: str) -> str:
    return "".join(text.replace("</think>", "").split())


def opening(kind: str) -> list[Message]:
    return [Message("system", words(600, kind)), Message("user", words(20, f"ask {kind}"))]


def user(text: str) -> Message:
    return Message("user", words(8, text))


TEMPLATES = (*more("semantic-tiny", "json_tools"), "drops_thoughts", "hoists", "mistral")
loop_templates = pytest.mark.parametrize(
    "run",
    ["json_tools", "mistral", *more("drops_thoughts", "semantic-tiny", "hoists")],
    indirect=True,
)
thoughts = pytest.mark.parametrize("run", ["drops_thoughts", *more("hoists")], indirect=True)
hoisting = pytest.mark.parametrize("run", ["hoists", *more("drops_thoughts")], indirect=True)


@pytest.fixture(params=TEMPLATES)
def run(request: pytest.FixtureRequest, tmp_path: Path) -> Run:
    """Runs a test with a model that is served with one of the templates."""
    name = request.param
    folder = name if name == "semantic-tiny" else write_model(tmp_path / name, name)

    def runs(test: Callable[[Served], Awaitable[None]]) -> None:
        async def whole() -> None:
            served = Served(folder, tmp_path / "store")
            await served.start()
            try:
                await test(served)
                await require_cold_answers(served)
            finally:
                await served.serving.close()

        asyncio.run(whole())

    return runs


async def require_cold_answers(served: Served) -> None:
    """Without any cache the same tokens are answered in the same way."""
    cold = Served(served.folder, served.store / "none", use_disk=False)
    await cold.start()
    try:
        for turn in served.turns[-CHECKED:]:
            if turn.answer.tool_calls:
                continue  # its grammar is no part of the tokens
            text = ""
            async for event in cold.serving.answer(Ask(turn.prompt, GREEDY, turn.max_tokens)):
                text += event.text if isinstance(event, TextDelta) else ""
            said = turn.answer.reasoning + turn.answer.content
            assert squeezed(text) == squeezed(said)
    finally:
        await cold.serving.close()


def test_a_session_stays_warm_whatever_its_template_makes_of_its_history(run: Run) -> None:
    async def test(served: Served) -> None:
        title = Talk(served, [Message("system", words(40, "title"))], agent="one")
        main = Talk(served, opening("main"), agent="one")
        await title.say(user("title"))
        await main.say()
        for number in range(examples(2, thorough=4)):
            await main.say(user(f"turn {number}"))
        await main.say(Message("system", words(8, "reminder")), user("after a reminder"))
        await served.restart()
        for number in range(examples(2, thorough=3)):
            await main.say(user(f"after a restart {number}"))
        require_warm(main)

    run(test)


@loop_templates
def test_a_loop_of_tool_calls_stays_warm(run: Run) -> None:
    async def test(served: Served) -> None:
        talk = Talk(served, opening("tools"), tools=(PICK,))
        for number in range(examples(2, thorough=20)):
            await talk.use_tool(number)
        await talk.say(choice=ToolChoice("none"))
        await talk.say(user("thanks"), choice=ToolChoice("none"))
        require_warm(talk)

    run(test)


@hoisting
def test_an_edit_and_another_try_cost_what_comes_after_them(run: Run) -> None:
    async def test(served: Served) -> None:
        talk = Talk(served, opening("edits"))
        for number in range(4):
            await talk.say(user(f"turn {number}"))
        before = talk.turns[2]
        talk.messages = [*talk.messages[:5], user("something else")]
        edited = await talk.say()
        assert edited.cached >= len(before.prompt) - BLOCK
        talk.messages.pop()
        again = await talk.say()
        assert again.prompt == edited.prompt
        assert again.cached == len(again.prompt) - 1

    run(test)


@thoughts
def test_agents_that_branch_off_one_context_share_it(run: Run) -> None:
    async def test(served: Served) -> None:
        parent = Talk(served, opening("parent"), agent="parent")
        for number in range(3):
            await parent.say(user(f"turn {number}"))
        children = [Talk(served, list(parent.messages), agent=f"child {n}") for n in range(4)]
        await asyncio.gather(*(child.say(user(child.agent or "")) for child in children))
        for child in children:
            await child.say(user("go on"))
            assert child.turns[0].cached >= len(parent.turns[-1].prompt) - BLOCK
            require_warm(child)

    run(test)


@hoisting
def test_what_was_read_before_a_client_left_is_not_read_again(run: Run) -> None:
    async def test(served: Served) -> None:
        talk = Talk(served, [Message("user", words(1200, "long"))])
        ask = Ask(Chat(tuple(talk.messages)), GREEDY, MAX_TOKENS)
        done = 0
        events = served.serving.answer(ask)
        async for event in events:
            if isinstance(event, PromptProgress) and event.done > 0.3 * event.total:
                done = event.done
                break
        await events.aclose()
        turn = await talk.say()
        assert turn.cached >= done - BLOCK

    run(test)


def test_a_thought_that_was_not_thought_is_no_part_of_a_known_history(tmp_path: Path) -> None:
    async def test() -> None:
        served = Served(write_model(tmp_path / "model", "drops_thoughts"), tmp_path / "store")
        await served.start()
        talk = Talk(served, opening("thoughts"))
        said = (await talk.say()).answer
        assert said.reasoning
        prompts = []
        for reasoning in ("", f" {said.reasoning}", "I never thought that."):
            talk.messages[2] = replace(said, reasoning=reasoning)
            chat = Chat((*talk.messages, user("next")))
            prompts.append(await served.serving.tokenize(chat))
        await served.serving.close()
        assert prompts[0] == prompts[1]
        assert prompts[2] != prompts[0]

    asyncio.run(test())


def test_no_tenant_goes_on_in_anothers_tokens(tmp_path: Path) -> None:
    async def test() -> None:
        served = Served(write_model(tmp_path / "model", "drops_thoughts"), tmp_path / "store")
        await served.start()
        talk = Talk(served, opening("tenants"))
        await talk.say()
        chat = Chat((*talk.messages, user("next")))
        own = await served.serving.tokenize(chat)
        others = await served.serving.tokenize(chat, tenant="other")
        await served.serving.close()
        assert own[: len(talk.turns[0].prompt)] == talk.turns[0].prompt
        assert own != others

    asyncio.run(test())
