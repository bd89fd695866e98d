"""Conversations as clients send them, in the order and forms that strict templates refuse."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from semantic.domain.chat import Message, Tool, ToolCall

LOOK: Final = Tool(
    "look",
    "Looks something up.",
    {"type": "object", "properties": {"what": {"type": "string"}}, "required": ["what"]},
)
TOOLS: Final = (LOOK, Tool("edit-file", "Edits.", {"type": "object", "properties": {}}))


def system(text: str) -> Message:
    return Message("system", text)


def user(text: str) -> Message:
    return Message("user", text)


def answer(text: str, *calls: str, reasoning: str = "") -> Message:
    """An assistant's text and calls of `look`; the call of `x` has the id `call_x`."""
    made = (ToolCall(f"call_{what}", "look", f'{{"what": "{what}"}}') for what in calls)
    return Message("assistant", text, reasoning, tuple(made))


def result(what: str, text: str) -> Message:
    """The result of the call of `what`."""
    return Message("tool", text, tool_call_id=f"call_{what}")


CONVERSATIONS: Final = {
    "question": (user("Q1"),),
    "instructed": (system("S1"), user("Q1")),
    "two turns": (system("S1"), user("Q1"), answer("A1"), user("Q2")),
    "two users": (user("Q1"), user("Q2"), answer("A1"), user("Q3")),
    "two answers": (user("Q1"), answer("A1"), answer("A2"), user("Q2")),
    "result": (user("Q1"), answer("", "C1"), result("C1", "R1")),
    "text and call": (user("Q1"), answer("A1", "C1"), result("C1", "R1")),
    "parallel": (user("Q1"), answer("", "C1", "C2"), result("C1", "R1"), result("C2", "R2")),
    "results, question": (
        user("Q1"),
        answer("", "C1", "C2"),
        result("C1", "R1"),
        result("C2", "R2"),
        answer("A1"),
        user("Q2"),
    ),
    "loop": (
        system("S1"),
        user("Q1"),
        answer("A1", "C1", reasoning="T1"),
        result("C1", "R1"),
        answer("A2", "C2", reasoning="T2"),
        result("C2", "R2"),
    ),
    "user after result": (user("Q1"), answer("", "C1"), result("C1", "R1"), user("Q2")),
    "user after result, answered": (
        user("Q1"),
        answer("", "C1"),
        result("C1", "R1"),
        user("Q2"),
        answer("A1"),
        user("Q3"),
    ),
    "user between results and answer": (
        user("Q1"),
        answer("", "C1"),
        result("C1", "R1"),
        user("Q2"),
        answer("", "C2"),
        result("C2", "R2"),
    ),
    "two users after a result": (
        user("Q1"),
        answer("", "C1"),
        result("C1", "R1"),
        user("Q2"),
        user("Q3"),
    ),
    "interrupted call": (user("Q1"), answer("A1", "C1"), user("Q2")),
    "interrupted call, answered": (
        user("Q1"),
        answer("", "C1"),
        user("Q2"),
        answer("A1"),
        user("Q3"),
    ),
    "one of two results": (user("Q1"), answer("", "C1", "C2"), result("C1", "R1"), user("Q2")),
    "assistant first": (answer("A1"), user("Q1")),
    "assistant first, instructed": (system("S1"), answer("A1"), user("Q1")),
    "call first": (answer("", "C1"), result("C1", "R1"), user("Q1")),
    "orphan result": (user("Q1"), result("C9", "R9"), user("Q2")),
    "orphan behind an answer": (user("Q1"), answer("A1"), result("C9", "R9"), user("Q2")),
    "two systems": (system("S1"), system("S2"), user("Q1")),
    "late system": (system("S1"), user("Q1"), answer("A1"), system("S2"), user("Q2")),
    "system at the end": (user("Q1"), answer("", "C1"), result("C1", "R1"), system("S1")),
    "late developer": (user("Q1"), answer("A1"), Message("developer", "S1"), user("Q2")),
    "empty contents": (system(""), user("Q1"), answer(""), user("Q2")),
    "empty result": (user("Q1"), answer("", "C1"), result("C1", ""), user("Q2")),
    "reasoning": (user("Q1"), answer("A1", reasoning="T1"), user("Q2")),
    "named result": (user("Q1"), answer("", "C1"), replace(result("C1", "R1"), name="look")),
}
"""By name. Texts are a letter and a number, each once: S system, Q question, A answer, C argument,
R result, T thought."""


def texts(messages: Sequence[Message]) -> list[str]:
    """What a model must see of a conversation, in order; a template may drop thoughts."""
    found = []
    for message in messages:
        found += [message.content, *(call.id.removeprefix("call_") for call in message.tool_calls)]
    return [text for text in found if text]
