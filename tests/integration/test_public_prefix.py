"""What an operator made public is computed once for all tenants; nothing else is shared."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from semantic.application.serving import Serving
from semantic.composition.engine_settings import Settings
from semantic.domain.answer import AnswerEnd, TextDelta
from semantic.domain.chat import Chat, Message
from semantic.domain.errors import InvalidRequestError
from semantic.domain.value_objects import BLOCK_TOKENS, SamplingParams
from semantic.ports.serving import Ask
from semantic.serve import ServeSettings, load_serving
from semantic_server.http.lifecycle import read_public_prefix
from tests.support.model_folder import small_model

pytestmark = pytest.mark.process

RULES = " ".join(f"Rule {i} is that {i} plus {i} is {2 * i}." for i in range(1, 60))


def chat(question: str, rules: str = RULES) -> Chat:
    return Chat((Message("system", rules), Message("user", question)))


async def ask(serving: Serving, tenant: str, asked: Chat) -> tuple[int, str]:
    """How many prompt tokens were cached, and the answer."""
    text, cached = "", -1
    async for event in serving.answer(Ask(asked, SamplingParams(), 12, "ann", tenant)):
        if isinstance(event, TextDelta):
            text += event.text
        if isinstance(event, AnswerEnd):
            assert event.reason in ("stop", "length"), event.error
            cached = event.usage.cached
    return cached, text


def settings(folder: Path, *public: Chat) -> ServeSettings:
    folder.mkdir(exist_ok=True)
    model, store = str(small_model(folder / "model")), folder / "store"
    engine = Settings(model, pool_blocks=400, use_disk=True, store=store, disk_bytes=1 << 28)
    return ServeSettings(engine, public=public)


def test_tenants_share_what_is_public_and_nothing_else(tmp_path: Path) -> None:
    public = Chat((Message("system", RULES),))

    async def run() -> None:
        serving = await load_serving(settings(tmp_path, public))
        shared = len(await serving.tokenize(public))
        assert shared > 2 * BLOCK_TOKENS
        first, answer = await ask(serving, "one", chat("What is 3 + 4?"))
        second, again = await ask(serving, "two", chat("What is 3 + 4?"))
        # Behind the system message stand the marks that open an answer, or a question.
        assert shared - 16 <= first == second <= shared
        assert answer == again
        private = RULES.replace("Rule 1 ", "Law 1 ")
        assert (await ask(serving, "one", chat("What is 5 + 4?", private)))[0] < 16
        assert (await ask(serving, "two", chat("What is 5 + 4?", private)))[0] < 16
        await serving.close()

        alone = await load_serving(settings(tmp_path / "other"))
        cold, expected = await ask(alone, "one", chat("What is 3 + 4?"))
        assert (cold, expected) == (0, answer)
        assert (await ask(alone, "two", chat("What is 3 + 4?")))[0] == 0
        await alone.close()

    asyncio.run(run())


def test_a_tenants_own_history_goes_on_behind_what_is_public(tmp_path: Path) -> None:
    public = Chat((Message("system", RULES),))

    async def life(question: Chat) -> tuple[int, str, int]:
        serving = await load_serving(settings(tmp_path, public))
        cached, answer = await ask(serving, "one", question)
        n_tokens = len(await serving.tokenize(question))
        await serving.close()
        return cached, answer, n_tokens

    first = chat("What is 3 + 4?")
    _, answer, n_first = asyncio.run(life(first))
    longer = Chat((*first.messages, Message("assistant", answer), Message("user", "And 2 + 2?")))
    cached, _, _ = asyncio.run(life(longer))
    assert cached >= n_first


def test_files_of_public_prefixes(tmp_path: Path) -> None:
    text, both = tmp_path / "rules.txt", tmp_path / "rules.json"
    text.write_text(RULES)
    both.write_text('{"messages": [{"role": "system", "content": "Be brief."}]}')
    assert read_public_prefix(text) == Chat((Message("system", RULES),))
    assert read_public_prefix(both) == Chat((Message("system", "Be brief."),))
    both.write_text('{"messages": []}')
    for wrong in (both, tmp_path / "none.txt"):
        with pytest.raises(InvalidRequestError, match=r"public_prefix: .*: "):
            read_public_prefix(wrong)
