"""Fake of the `ChatFormat` port: no template, JSON calls between marks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from semantic.application.chat.call_grammar import CallLanguage, arguments_schema, call_grammar
from semantic.domain.chat import Chat, Message
from semantic.domain.errors import InvalidRequestError
from semantic.domain.grammar import Grammar
from semantic.ports.chat import CallSpelling, Headers, Marks, RenderedChat
from tests.support.fake_tokenizer import ByteTokenizer

CALL_MARKS = Marks("<tool_call>", "</tool_call>")


class FakeChatFormat:
    """Concatenates roles, contents, thoughts and calls, in `ByteTokenizer`'s bytes.

    With `thought_marks` the model thinks; the template option "open" makes the prompt open the
    thought.
    """

    def __init__(self, thought_marks: Marks | None = None, call_marks: Marks = CALL_MARKS) -> None:
        self._thought_marks = thought_marks
        self._call_marks = call_marks
        self._tokenizer = ByteTokenizer()

    @property
    def thought_marks(self) -> Marks | None:
        return self._thought_marks

    @property
    def thought_end_tokens(self) -> tuple[int, ...]:
        if self._thought_marks is None:
            return ()
        return tuple(self._tokenizer.encode(self._thought_marks.end, add_special_tokens=False))

    @property
    def call_marks(self) -> Marks:
        return self._call_marks

    @property
    def headers(self) -> Headers | None:
        return None

    @property
    def loops_only(self) -> bool:
        return False

    @property
    def silent_marks(self) -> tuple[str, ...]:
        return ()

    @property
    def bare_calls(self) -> bool:
        return False

    @property
    def call_spelling(self) -> CallSpelling | None:
        return None  # calls are JSON

    def render(self, chat: Chat) -> RenderedChat:
        if not chat.messages:
            raise InvalidRequestError("messages must hold at least one message, got none")
        tools = f"<tools>{[tool.name for tool in chat.tools]}\n" if chat.tools else ""
        return self._rendered(chat, tools + _lines(chat.messages))

    def render_after(self, chat: Chat, n_messages: int) -> RenderedChat | None:
        later = self._rendered(chat, "\n" + _lines(chat.messages[n_messages:]))
        return replace(later, tokens=later.tokens[1:])  # without BOS

    def _rendered(self, chat: Chat, lines: str) -> RenderedChat:
        opens = self._thought_marks is not None and chat.template_options.get("open") is True
        generation_prompt = "<assistant>"
        if opens and self._thought_marks is not None:
            generation_prompt += self._thought_marks.start
        return RenderedChat(tuple(self._tokenizer.encode(lines + generation_prompt)), opens)

    def call_grammar(self, chat: Chat, *, opens_thought: bool, tenant: str = "") -> Grammar | None:
        del tenant
        if chat.tool_choice.mode == "required" and not chat.tools:
            raise InvalidRequestError("tool_choice asks for a call, but there are no tools")
        thought = self._thought_marks
        language = CallLanguage(self._call_marks, thought)
        after = thought.end if thought is not None and opens_thought else None
        return call_grammar(chat, language, arguments_schema, after=after)


def _lines(messages: Sequence[Message]) -> str:
    lines = []
    for message in messages:
        calls = "".join(f"({call.name} {call.arguments})" for call in message.tool_calls)
        lines.append(f"<{message.role}>{message.reasoning}{message.content}{calls}\n")
    return "".join(lines)
