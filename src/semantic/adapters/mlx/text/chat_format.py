"""How one model writes conversations, thoughts and calls, as mlx-lm and its tokenizer say.

Knows the tokenizer; not the model, and not how a grammar is enforced.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache

from llguidance import LLMatcher

from semantic.adapters.mlx.sampling.deep_stack import on_deep_stack
from semantic.adapters.mlx.sampling.grammar_source import grammar_source
from semantic.adapters.mlx.text import chat_template as template
from semantic.adapters.mlx.text import tool_call_parser as call_reader
from semantic.adapters.mlx.text.incremental_rendering import Continuation
from semantic.adapters.mlx.text.json_values import unicode_text
from semantic.adapters.mlx.text.special_tokens import Hidden, TokenGuard
from semantic.adapters.mlx.text.template_messages import hidden_in, messages_for, tools_for
from semantic.adapters.mlx.text.tokenizer import NO_TEMPLATE, MLXTokenizer
from semantic.adapters.mlx.text.tool_text import TEXT_CALL_MARKS
from semantic.application.chat.call_grammar import (
    ANY_OBJECT,
    CallLanguage,
    SpelledMark,
    arguments_schema,
    call_grammar,
)
from semantic.domain.chat import Chat, JsonSchema, Tool
from semantic.domain.errors import InvalidRequestError
from semantic.domain.grammar import Grammar
from semantic.ports.chat import Marks, RenderedChat, WrittenCall

# What belongs to the way a template is applied, not to what it says.
_NOT_OPTIONS = frozenset(
    {
        "add_generation_prompt", "chat_template", "continue_final_message", "conversation",
        "documents", "max_length", "messages", "padding", "return_assistant_tokens_mask",
        "return_dict", "return_tensors", "sanitize_control_tokens", "self", "tokenize",
        "tokenizer_kwargs", "tools", "truncation",
    }
)  # fmt: skip
_THINKING_OPTIONS = ("enable_thinking", "thinking")


class MLXChatFormat:
    """Implements `ChatFormat` for one tokenizer. Any thread may call it."""

    def __init__(self, tokenizer: MLXTokenizer) -> None:
        inner = tokenizer.inner
        self._tokenizer = tokenizer
        self._inner = inner
        source = _template_source(inner.chat_template)
        self._traits = template.Traits()
        if inner.has_chat_template:
            self._traits = template.read_traits(
                self._apply, source, reads_calls=inner.tool_parser is not None
            )
        self._thought: Marks | None = None
        if inner.think_start and inner.think_end:
            self._thought = Marks(inner.think_start, inner.think_end)
        self._parser: call_reader.Parser | None = None
        self._calls = TEXT_CALL_MARKS
        if self._traits.tools and inner.tool_call_start is not None:
            self._parser = inner.tool_parser
            self._calls = Marks(inner.tool_call_start, inner.tool_call_end or "")
        self._added = {
            token.content: number for number, token in inner.added_tokens_decoder.items()
        }
        self._guard = self._new_guard(source)
        self._continuation = Continuation(
            self.render, tokenizer.eos_token_ids, thinks=self._thought is not None
        )

    @property
    def thought_marks(self) -> Marks | None:
        """See `ChatFormat.thought_marks`."""
        return self._thought

    @property
    def call_marks(self) -> Marks:
        """See `ChatFormat.call_marks`."""
        return self._calls

    def render(self, chat: Chat) -> RenderedChat:
        """See `ChatFormat.render`.

        A system message that the template does not allow where it stands is written there as the
        user's, between <system> marks. Special tokens that a text spells stay text.
        """
        if not self._inner.has_chat_template:
            raise InvalidRequestError(NO_TEMPLATE)
        if not chat.messages:
            raise InvalidRequestError("messages must hold at least one message, got none")
        hidden = Hidden(self._guard, _texts(chat))
        options = _options(chat.template_options, hidden)
        tools = tools_for(chat.tools, hidden) if chat.tools and self._traits.tools else None
        messages = messages_for(chat, self._traits, hidden)
        text = unicode_text(template.render(self._apply, messages, tools, options))
        thought = self._thought
        return RenderedChat(
            tuple(self._guard.encode(text, hidden)),
            opens_thought=thought is not None and text.rstrip().endswith(thought.start),
        )

    def render_after(self, chat: Chat, n_messages: int) -> RenderedChat | None:
        """See `ChatFormat.render_after`."""
        return self._continuation.after(chat, n_messages)

    @property
    def history(self) -> str:
        """What becomes of history with this template, for people."""
        if not self._continuation.works:
            return "the chat template cannot go on from an answer: history is rendered every time"
        if not self._continuation.keeps_history:
            return "the chat template changes history: known history is replayed as it was written"
        return "the chat template keeps history as it was written"

    def read_calls(self, text: str, tools: Sequence[Tool]) -> list[WrittenCall]:
        """See `ChatFormat.read_calls`. JSON is read whatever the model's own form is."""
        return call_reader.read_calls(self._parser, text, tools)

    def call_grammar(self, chat: Chat, *, opens_thought: bool) -> Grammar | None:
        """See `ChatFormat.call_grammar`.

        A thought that the prompt opened comes before the grammar. Where the model may open one by
        itself, the grammar begins with a thought that may be left out.
        """
        _check_choice(chat)
        after = self._thought.end if opens_thought and self._thought else None
        if chat.answer_format is not None:
            _check_schema(chat.answer_format.schema or ANY_OBJECT, "the answer's format")
        return call_grammar(chat, self._language(chat), _arguments, after=after)

    def _language(self, chat: Chat) -> CallLanguage:
        thought = None
        if self._thought is not None and _may_think(chat):
            thought = (self._spelled(self._thought.start), self._spelled(self._thought.end))
        return CallLanguage(
            self._spelled(self._calls.start), self._spelled(self._calls.end), thought
        )

    def _spelled(self, mark: str) -> SpelledMark:
        """`mark` in the tokens that it is written with: an added token is no text to a grammar."""
        pieces: list[int | str] = []
        at = 0
        while at < len(mark):
            token = self._added_at(mark, at)
            if token is not None:
                pieces.append(self._added[token])
            elif pieces and isinstance(pieces[-1], str):
                pieces[-1] += mark[at]
            else:
                pieces.append(mark[at])
            at += len(token or mark[at])
        return SpelledMark(mark, tuple(pieces))

    def _added_at(self, mark: str, at: int) -> str | None:
        fitting = (token for token in self._added if token and mark.startswith(token, at))
        return max(fitting, key=len, default=None)

    def _apply(
        self,
        messages: list[template.TemplateMessage],
        tools: list[template.TemplateMessage] | None,
        options: Mapping[str, object],
    ) -> str:
        text = self._inner.apply_chat_template(
            messages, tools=tools, tokenize=False, add_generation_prompt=True, **options
        )
        if not isinstance(text, str):
            raise TypeError(f"expected a rendered template, got {type(text).__name__}")
        return text

    def _new_guard(self, source: str) -> TokenGuard:
        own = source + "".join(
            mark for pair in (self._thought, self._calls) if pair for mark in (pair.start, pair.end)
        )
        special, marks = {}, {}
        for number, token in self._inner.added_tokens_decoder.items():
            if token.special:
                special[token.content] = number
            elif not token.content.isspace() and token.content in own:
                marks[token.content] = number
        return TokenGuard(self._tokenizer.encode_rendered, special=special, marks=marks)


def _template_source(chat_template: object) -> str:
    """The text of a template, or of several of different names."""
    if isinstance(chat_template, dict):
        return "\n".join(map(str, chat_template.values()))
    return chat_template if isinstance(chat_template, str) else ""


def _options(options: Mapping[str, object], hidden: Hidden) -> dict[str, object]:
    """The options for a template, by name."""
    for name in options:
        if name in _NOT_OPTIONS or name.endswith("_token"):
            raise InvalidRequestError(f"chat_template_kwargs cannot set {name!r}")
    return {name: hidden_in(value, hidden) for name, value in options.items()}


def _texts(chat: Chat) -> Iterator[str]:
    """All that a chat says, roughly: whatever a word in it may be part of."""
    for message in chat.messages:
        yield from (message.content, message.reasoning, message.name or "")
        yield message.tool_call_id or ""
        for call in message.tool_calls:
            yield from (call.id, call.name, call.arguments)
    yield from map(repr, chat.tools)
    yield repr(chat.template_options)


def _may_think(chat: Chat) -> bool:
    return not any(chat.template_options.get(name) is False for name in _THINKING_OPTIONS)


def _check_choice(chat: Chat) -> None:
    """A choice that asks for a call needs a tool to call."""
    names = [tool.name for tool in chat.tools]
    wanted = chat.tool_choice.name
    if chat.tool_choice.mode == "required" and not names:
        raise InvalidRequestError("tool_choice asks for a call, but there are no tools")
    if wanted is not None and wanted not in names:
        raise InvalidRequestError(
            f"tool_choice names {wanted!r}; expected one of {', '.join(names) or 'no tools'}"
        )


def _arguments(tool: Tool) -> JsonSchema:
    """What a call of `tool` must fit: its own schema where that can be enforced.

    Only a strict tool has a right to it; for others any object will do.
    """
    schema = arguments_schema(tool)
    if tool.strict:
        _check_schema(schema, f"the parameters of {tool.name}")
        return schema
    return ANY_OBJECT if _problem(json.dumps(schema)) else schema


def _check_schema(schema: JsonSchema, what: str) -> None:
    problem = _problem(json.dumps(schema))
    if problem:
        raise InvalidRequestError(f"{what} cannot be enforced: {problem}")


@lru_cache(maxsize=64)
def _problem(schema: str) -> str:
    """Why a JSON schema cannot be enforced; empty when it can."""
    try:
        source = grammar_source(Grammar("json_schema", schema))
    except InvalidRequestError as error:
        return str(error)
    wrong, messages = on_deep_stack(lambda: LLMatcher.validate_grammar_with_warnings(source))
    return "; ".join(messages).strip() if wrong else ""
