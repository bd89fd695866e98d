"""Chat format of one model: renders chats, parses tool calls, builds grammars for answers."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial

from semantic.adapters.mlx.sampling.grammar_compiler import GrammarCompiler
from semantic.adapters.mlx.text.chat_template import (
    TEMPLATE_ERRORS,
    TemplateFeatures,
    TemplateMessage,
    detect_features,
    in_parts,
)
from semantic.adapters.mlx.text.template_messages import (
    WriteCalls,
    escape_all,
    template_messages,
    template_tools,
)
from semantic.adapters.mlx.text.tokenizer import (
    NO_TEMPLATE,
    Escaper,
    MLXTokenizer,
    SpecialTokens,
    refusal,
)
from semantic.application.chat.argument_types import with_types
from semantic.application.chat.call_grammar import (
    ANY_OBJECT,
    CallLanguage,
    SpelledMark,
    answer_grammar,
    arguments_schema,
    call_grammar,
    enforced_schemas,
)
from semantic.application.chat.families import HERMES, Parsers, family_of, thought_of
from semantic.domain.chat import Chat, JsonSchema, Message, Tool, ToolCall, replace_surrogates
from semantic.domain.errors import InvalidRequestError
from semantic.domain.grammar import Grammar
from semantic.domain.prefix import common_prefix
from semantic.ports.chat import OBJECTS, Marks, RenderedChat
from semantic.ports.serving import ToolSupport

Render = Callable[[Chat], RenderedChat]

_QUESTION = Message("user", "x")
_ANSWER_TEXT = "y"


class IncrementalRenderer:
    """Continues a rendered chat without rendering its history again.

    `is_supported` says whether the template allows it. `preserves_history` is True if a full
    rendering shows earlier answers exactly as the model generated them.
    """

    def __init__(
        self,
        render: Render,
        eos: frozenset[int],
        *,
        thinks: bool,
        single_calls: bool = False,
        loops_only: bool = False,
    ) -> None:
        """`render` renders a whole chat; `eos` tokens end an answer; `thinks` says that the model
        marks thoughts. If `single_calls`, several tool calls become several answers."""
        self._render = render
        self._eos = eos
        self._single_calls = single_calls
        self._has_late_tools = self._writes_tools_late()
        self.loops_only = loops_only or self._has_late_tools
        self.is_supported = self._is_supported()
        self.preserves_history = self._preserves_history(thinks=thinks)

    def render_after(self, chat: Chat, n_messages: int) -> RenderedChat | None:
        after = self._render_after(chat, n_messages) if self.is_supported else None
        if after is None or not (self._has_late_tools and chat.tools):
            return after
        other = replace(chat, tools=(Tool("probeother"),))
        return after if after == self._render_after(other, n_messages) else None

    def _render_after(self, chat: Chat, n_messages: int) -> RenderedChat | None:
        answer = chat.messages[n_messages - 1]
        if self._single_calls and len(answer.tool_calls) > 1:
            return None
        calls = tuple(replace(call, arguments="{}") for call in answer.tool_calls)
        substitute = replace(answer, content=_ANSWER_TEXT, reasoning="", tool_calls=calls)
        # After a chat's beginning, templates only test whether there are tools, so one is enough.
        short = replace(chat, tools=chat.tools[:1])
        later = chat.messages[n_messages:]
        question = self._render(replace(short, messages=(_QUESTION,))).tokens
        whole = self._render(replace(short, messages=(_QUESTION, substitute, *later)))
        begin = common_prefix(question, whole.tokens)
        for at in range(begin, len(whole.tokens)):
            if whole.tokens[at] in self._eos:
                return replace(whole, tokens=whole.tokens[at:])
        return None

    def _writes_tools_late(self) -> bool:
        question, tools = Message("user", "probe1"), (Tool("probetool"), Tool("probeother"))
        chat = Chat((question, Message("assistant", "probe2"), question), tools)
        try:
            after, whole = self._render_after(chat, 2), self._render(chat).tokens
        except InvalidRequestError:
            return False
        return after is not None and whole[-len(after.tokens) :] != after.tokens

    def _is_supported(self) -> bool:
        question, tool = Message("user", "probe1"), Tool("probetool")
        later = Message("tool", "probe4", tool_call_id="probe5") if self.loops_only else question
        last = []
        try:
            for text in ("probe2", "probe3"):
                call = ToolCall("probe5", tool.name, json.dumps({text: text}))
                said, calls = ("", (call,)) if self.loops_only else (text, ())
                answer = Message("assistant", said, tool_calls=calls)
                chat = Chat((question, answer, later, answer, later), (tool,) if calls else ())
                whole = self._render(chat).tokens
                after = self._render_after(chat, 4)
                if after is None or whole[-len(after.tokens) :] != after.tokens:
                    return False
                last.append(whole[: -len(after.tokens)][-1:])
        except InvalidRequestError:
            return False
        return self.loops_only or last[0] != last[1]

    def _preserves_history(self, *, thinks: bool) -> bool:
        """Return whether rendering a whole chat shows an earlier answer exactly as generated."""
        question = Message("user", "probe1")
        answer, other = (Message("assistant", "probe2", thought) for thought in ("no", "yes"))
        try:
            first, second, third = (
                self._render(Chat((question, *(answer, question) * n))).tokens for n in range(3)
            )
            shows = second != self._render(Chat((question, other, question))).tokens
        except InvalidRequestError:
            return False
        # `first` ends with the generation prompt; in history, an answer may begin differently.
        generation_prompt = first[common_prefix(first, second) :]
        return second[common_prefix(second, third) :] == generation_prompt and (shows or not thinks)


NO_USERS = (
    "cannot render the messages: the model's chat template leaves out what a user says; "
    "give its folder another chat_template.jinja"
)

_NO_TOOLS = (
    "cannot use tool_call_parser {}: the model's chat template renders no tools; leave it out to "
    "offer tools as text"
)
_CALLS: Mapping[ToolSupport, str] = {
    "native": "the engine parses calls as {}",
    "text": "the chat template has no tools: the engine offers them as text and parses calls as {}",
    "unknown": "the chat template shows tools in a form that no parser knows: the engine offers "
    "them as text and parses calls as {}; --tool-call-parser names another form",
}

# Arguments of `apply_chat_template` itself, which a request cannot set.
_RESERVED_OPTIONS = frozenset(
    {
        "add_generation_prompt", "chat_template", "continue_final_message", "conversation",
        "documents", "max_length", "messages", "padding", "return_assistant_tokens_mask",
        "return_dict", "return_tensors", "sanitize_control_tokens", "self", "tokenize",
        "tokenizer_kwargs", "tools", "truncation",
    }
)  # fmt: skip
_THINKING_OPTIONS = ("enable_thinking", "thinking")


class MLXChatFormat:
    """A `ChatFormat` for one tokenizer. Any thread may call it."""

    def __init__(
        self,
        tokenizer: MLXTokenizer,
        grammars: GrammarCompiler | None = None,
        parsers: Parsers | None = None,
    ) -> None:
        """`parsers` take precedence over the tokenizer's files. Raises InvalidRequestError if
        `parsers` has a tool-call parser but the template has no tools."""
        inner = tokenizer.inner
        self._grammars = grammars or GrammarCompiler(None, (), 0)
        self._tokenizer = tokenizer
        self._inner = inner
        self.source = source = _template_source(inner.chat_template)
        named = parsers or Parsers()
        parser = named.calls or str(inner.init_kwargs.get("tool_parser_type"))
        family = family_of(source, inner.get_vocab(), parser)
        self._features = TemplateFeatures()
        if inner.has_chat_template:
            self._features = detect_features(
                self._apply,
                source,
                parses_calls=family is not None,
                numbered_ids=family is not None and family.numbered_ids,
            )
        self._no_tools: list[TemplateMessage] | None = [] if self._features.lists_tools else None
        if named.calls is not None and not self._features.tools:
            raise InvalidRequestError(_NO_TOOLS.format(named.calls))
        found = thought_of(source)
        if family is not None and family.thought is not None:
            found = family.thought
        elif inner.think_start and inner.think_end:
            found = Marks(inner.think_start, inner.think_end)
        self.thought_marks = named.thought(found)
        self.call_marks, self.call_spelling = HERMES.marks, HERMES.spelling
        self.call_parser = HERMES.names[0]
        self.headers = None if family is None else family.headers
        self.silent_marks = () if family is None else family.silent
        self.bare_calls = False
        self._form = OBJECTS
        self._write: WriteCalls = HERMES.written
        if self._features.tools and family is not None:
            self.call_marks, self.call_spelling = family.marks, family.spelling
            self.call_parser = named.calls or family.names[0]
            self.bare_calls, self._form = family.bare, family.form
            self._write = family.written
        self._added = {
            token.content: number for number, token in inner.added_tokens_decoder.items()
        }
        self._special_tokens = self._find_special_tokens(source)
        self._incremental = IncrementalRenderer(
            self.render,
            tokenizer.eos_token_ids,
            thinks=self.thought_marks is not None,
            single_calls=self._features.single_calls,
            loops_only=self.headers is not None,
        )
        self.loops_only = self._incremental.loops_only

    @property
    def thought_end_tokens(self) -> tuple[int, ...]:
        marks, headers = self.thought_marks, self.headers
        if marks is None:
            return ()
        end = marks.end
        if headers is not None:
            end += headers.following + headers.answer
        return tuple(self._special_tokens.encode_following(end))

    def render(self, chat: Chat) -> RenderedChat:
        """See `ChatFormat.render`. A special token that a text spells out stays text."""
        if not self._inner.has_chat_template:
            raise InvalidRequestError(NO_TEMPLATE)
        if self._features.loses_users:
            raise InvalidRequestError(NO_USERS)
        if not chat.messages:
            raise InvalidRequestError("messages must hold at least one message, got none")
        escaper = Escaper(self._special_tokens, _texts(chat))
        options = _options(chat.template_options, escaper)
        messages = template_messages(chat, self._features, escaper, self._write)
        try:
            text = self._applied(messages, chat.tools, options, escaper)
        except TEMPLATE_ERRORS as error:
            raise refusal(error) from error
        text = replace_surrogates(text)
        marks = self.thought_marks
        return RenderedChat(
            tuple(self._special_tokens.encode(text, escaper)),
            opens_thought=marks is not None and text.rstrip().endswith(marks.start),
        )

    def render_after(self, chat: Chat, n_messages: int) -> RenderedChat | None:
        return self._incremental.render_after(chat, n_messages)

    @property
    def tools(self) -> ToolSupport:
        """How the engine offers tools to the model."""
        if self._features.tools:
            return "native"
        return "unknown" if self._features.unread_calls else "text"

    @property
    def calls(self) -> str:
        """A line for the log, which says how the engine parses tool calls and reasoning."""
        marks = self.thought_marks
        thought = (
            "no reasoning" if marks is None else f"reasoning between {marks.start} and {marks.end}"
        )
        return f"{_CALLS[self.tools].format(self.call_parser)}; {thought}"

    def tell(self, logger: logging.Logger) -> None:
        logger.info(self.history)
        logger.log(logging.WARNING if self.tools == "unknown" else logging.INFO, self.calls)

    @property
    def history(self) -> str:
        """A line for the log, which says how this template renders history."""
        if not self._incremental.is_supported:
            return "the chat template cannot continue an answer: every prompt renders all history"
        if not self._incremental.preserves_history:
            return "the chat template changes history: the engine replays it unchanged"
        return "the chat template keeps history unchanged"

    def call_grammar(self, chat: Chat, *, opens_thought: bool, tenant: str = "") -> Grammar | None:
        """See `ChatFormat.call_grammar`. The grammar applies after a thought."""
        _check_choice(chat)
        schemas = [json.dumps(schema) for schema in enforced_schemas(chat)]
        self._grammars.require_checked(schemas, tenant)
        after = self.thought_marks.end if opens_thought and self.thought_marks else None
        wanted = chat.answer_format
        if wanted is not None and wanted.grammar is None:
            self._check_schema(wanted.schema or ANY_OBJECT, "the answer's format", tenant)
        elif wanted is not None:
            self._grammars.require_enforceable(replace(answer_grammar(wanted), tenant=tenant))
        arguments = partial(self._arguments, tenant)
        return call_grammar(chat, self._language(chat), arguments, after=after)

    def _arguments(self, tenant: str, tool: Tool) -> JsonSchema:
        """Return the schema to enforce for the arguments of `tool`."""
        schema = arguments_schema(tool)
        if tool.strict:
            self._check_schema(schema, f"the parameters of {tool.name}", tenant)
            return schema
        return ANY_OBJECT if self._grammars.schema_error(json.dumps(schema), tenant) else schema

    def _check_schema(self, schema: JsonSchema, what: str, tenant: str) -> None:
        problem = self._grammars.schema_error(json.dumps(schema), tenant)
        if problem:
            raise InvalidRequestError(f"cannot enforce {what}: {problem}")

    def _language(self, chat: Chat) -> CallLanguage:
        silent = any(chat.template_options.get(name) is False for name in _THINKING_OPTIONS)
        thought = None if silent else self.thought_marks
        marks = self.call_marks
        if set(self._spelled(marks.end).pieces) & self._tokenizer.eos_token_ids:
            marks = replace(marks, end="")  # it ends the answer, so grammars omit it
        return CallLanguage(
            marks, thought, self._form, self.headers, self.bare_calls, self._spelled
        )

    def _spelled(self, mark: str) -> SpelledMark:
        """Return `mark` as texts and ids of added tokens, as a grammar needs it."""
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

    def _applied(
        self,
        messages: list[TemplateMessage],
        tools: Sequence[Tool],
        options: Mapping[str, object],
        escaper: Escaper,
    ) -> str:
        given = template_tools(tools, escaper) if self._features.tools else []
        try:
            return self._apply(messages, given or self._no_tools, options)
        except RecursionError:
            if not given:
                raise
        # Some templates recurse forever on a parameter without a type.
        typed = [replace(one, parameters=with_types(one.parameters)) for one in tools]
        return self._apply(messages, template_tools(typed, escaper), options)

    def _apply(
        self,
        messages: list[TemplateMessage],
        tools: list[TemplateMessage] | None,
        options: Mapping[str, object],
    ) -> str:
        given = {"tools": tools, "add_generation_prompt": True, **options}
        return self._tokenizer.apply_template(messages, given)

    def _find_special_tokens(self, source: str) -> SpecialTokens:
        """Return the special tokens, and the added tokens that are in `source` or in the marks."""
        pairs = [pair for pair in (self.thought_marks, self.call_marks) if pair]
        ours = "".join(mark for pair in pairs for mark in (pair.start, pair.end))
        around = self._around_messages()
        special, marks = {}, {}
        for number, token in self._inner.added_tokens_decoder.items():
            text = token.content
            if token.special or (text in around and text not in ours and not text.isspace()):
                special[text] = number
            elif not text.isspace() and text in source + ours:
                marks[text] = number
        return SpecialTokens(self._tokenizer.encode_rendered, special=special, marks=marks)

    def _around_messages(self) -> str:
        if not self._inner.has_chat_template:
            return ""
        roles: list[TemplateMessage] = [
            {"role": role, "content": "x"} for role in ("user", "assistant", "user")
        ]
        features = self._features
        given = in_parts(roles) if features.parts else roles
        try:
            return self._apply(given, self._no_tools, {})
        except TEMPLATE_ERRORS:
            return ""


def _template_source(chat_template: object) -> str:
    if isinstance(chat_template, dict):
        return "\n".join(map(str, chat_template.values()))
    return chat_template if isinstance(chat_template, str) else ""


def _options(options: Mapping[str, object], escaper: Escaper) -> dict[str, object]:
    for name in options:
        if name in _RESERVED_OPTIONS or name.endswith("_token"):
            raise InvalidRequestError(f"chat_template_kwargs cannot set {name!r}")
    return {name: escape_all(value, escaper) for name, value in options.items()}


def _texts(chat: Chat) -> Iterator[str]:
    """Yield all texts of a chat. Placeholders must not occur in them."""
    for message in chat.messages:
        yield from (message.content, message.reasoning, message.name or "")
        yield message.tool_call_id or ""
        for call in message.tool_calls:
            yield from (call.id, call.name, call.arguments)
    yield from map(repr, chat.tools)
    yield repr(chat.template_options)


def _check_choice(chat: Chat) -> None:
    names = [tool.name for tool in chat.tools]
    name = chat.tool_choice.name
    if chat.tool_choice.mode == "required" and not names:
        raise InvalidRequestError("tool_choice asks for a call, but there are no tools")
    if name is not None and name not in names:
        raise InvalidRequestError(
            f"tool_choice names {name!r}; expected one of {', '.join(names) or 'no tools'}"
        )
