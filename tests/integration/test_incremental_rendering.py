"""Going on by a template without rendering history: the same tokens where nothing changes it."""

from __future__ import annotations

from pathlib import Path

import pytest

from semantic.adapters.mlx.text.chat_format import MLXChatFormat
from semantic.domain.chat import Chat, Message, ToolCall
from tests.support.chat_templates import FORMATS, TOOLS, load_format

CALL = ToolCall("call00001", "get_weather", '{"city": "Oslo", "days": 2}')
CALLED = (Message("user", "Weather?"), Message("assistant", "", "", (CALL,)))
LATER = {
    "question": (Message("user", "Hi"), Message("assistant", "Hello"), Message("user", "Well?")),
    "result": (*CALLED, Message("tool", "Rain.", tool_call_id=CALL.id)),
    "two answers": (
        *(Message("user", "Hi"), Message("assistant", "Hello"), Message("user", "Well?")),
        *(Message("assistant", "Fine <|end|>."), Message("user", "Good.")),
    ),
}
CHANGED = "the chat template changes history: the engine replays it unchanged"
SAY = {  # these models think, and their templates drop what they thought
    **dict.fromkeys(("drops_thoughts", "gemma4", "longcat", "kimi_k3", "minimax_m2"), CHANGED),
    "no_template": "the chat template cannot continue an answer: every prompt renders all history",
}


def chat_format(name: str, folder: Path) -> MLXChatFormat:
    return MLXChatFormat(load_format(FORMATS[name], folder))


@pytest.mark.parametrize("name", [name for name in FORMATS if name != "no_template"])
@pytest.mark.parametrize("later", LATER)
def test_what_comes_after_an_answer_is_the_end_of_the_whole(
    name: str, later: str, tmp_path: Path
) -> None:
    by = chat_format(name, tmp_path)
    chat = Chat((Message("system", "Be kind."), *LATER[later]), TOOLS)
    whole, after = by.render(chat), by.render_after(chat, 3)
    assert after is not None
    assert after.tokens == whole.tokens[-len(after.tokens) :]
    assert after.opens_thought == whole.opens_thought
    said = by.render(Chat((*chat.messages[:2], Message("assistant", "other")), TOOLS))
    assert len(after.tokens) < len(whole.tokens) - len(said.tokens) // 2


@pytest.mark.parametrize("name", FORMATS)
def test_what_becomes_of_history_is_told(name: str, tmp_path: Path) -> None:
    expected = SAY.get(name, "the chat template keeps history unchanged")
    assert chat_format(name, tmp_path).history == expected
