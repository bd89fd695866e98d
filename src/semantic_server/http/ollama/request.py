"""Requests of POST /api/chat and /api/generate: what each field means, translated to the domain's
types.

Every field is validated before anything is generated. Knows no HTTP and no replies.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from semantic.application.chat.call_grammar import answer_grammar
from semantic.domain.chat import Chat, Message
from semantic.domain.value_objects import SamplingParams
from semantic.ports.serving import Ask, Prompt, ServedModel
from semantic_server.http.errors import FieldError
from semantic_server.http.ollama.conversation import (
    ConversationReader,
    read_context,
    read_tools,
)
from semantic_server.http.ollama.fields import CHAT_FIELDS, GENERATE_FIELDS, OTHER_WIRES
from semantic_server.http.ollama.options import (
    read_flag,
    read_format,
    read_keep_alive,
    read_logprobs,
    read_options,
    read_think,
)
from semantic_server.http.openai.fields import text_at, warnings
from semantic_server.http.openai.requests import Caller, check_model
from semantic_server.http.request_fields.table import Field, fields_of

LATEST: Final = ":latest"
"""The tag of a model whose name has none."""


@dataclass(frozen=True, slots=True)
class OllamaRequest:
    """A parsed request. `ask` is None for one without a prompt, which only loads the model.

    `model` is the name as it was given. `keep_alive` is for how many seconds the model stays loaded
    after it; None for as long as the server keeps it.
    """

    model: str
    ask: Ask | None
    stream: bool
    keep_alive: float | None

    @property
    def messages(self) -> tuple[Message, ...]:
        """The conversation that is answered; empty for a prompt without one."""
        prompt = None if self.ask is None else self.ask.prompt
        return prompt.messages if isinstance(prompt, Chat) else ()


def chat_request(body: Mapping[str, object], model: ServedModel, caller: Caller) -> OllamaRequest:
    """Parse the body of POST /api/chat. Raises InvalidRequestError and ModelNotFoundError."""
    known = _known(body, CHAT_FIELDS, model)
    messages = ConversationReader().read(known.get("messages"))
    tools = read_tools(known.get("tools"))
    chat = Chat(messages, tools) if messages else None
    return _request(known, chat, model, caller)


def generate_request(
    body: Mapping[str, object], model: ServedModel, caller: Caller
) -> OllamaRequest:
    """Parse the body of POST /api/generate. Raises InvalidRequestError and ModelNotFoundError."""
    known = _known(body, GENERATE_FIELDS, model)
    text = text_at("prompt", known.get("prompt", ""))
    system = text_at("system", known.get("system", ""))
    before = read_context(known.get("context"))
    prompt: Prompt | None = None
    if read_flag(known, "raw", default=False):
        for name, value in (("system", system), ("context", before)):
            if value:
                raise FieldError(f"{name}: a raw prompt has none", param=name)
        prompt = text or None
    elif text:
        prompt = Chat((*before, *_new_system(system, before), Message("user", text)))
    return _request(known, prompt, model, caller)


def _new_system(system: str, before: Sequence[Message]) -> tuple[Message, ...]:
    """The system message to add: none if it is the last one before, as clients repeat it."""
    last = next((one for one in reversed(before) if one.role == "system"), None)
    is_said = last is not None and last.content == system
    return () if is_said or not system else (Message("system", system),)


def _request(
    known: Mapping[str, object], prompt: Prompt | None, model: ServedModel, caller: Caller
) -> OllamaRequest:
    options = read_options(known.get("options"), model)
    think, thinking_tokens = read_think(known.get("think"))
    sampling = replace(options.sampling, logprobs=read_logprobs(known))
    prompt, sampling = _in_form(prompt, sampling, known, think)
    ask = None
    if prompt is not None:
        ask = Ask(
            prompt,
            sampling,
            options.max_tokens,
            caller.agent,
            caller.tenant,
            caller.identity,
            thinking_tokens,
            caller.keep,
            options.context_tokens,
            numbered_calls=True,
            hints=caller.hints,
        )
    return OllamaRequest(
        text_at("model", known["model"]),
        ask,
        read_flag(known, "stream", default=True),
        read_keep_alive(known.get("keep_alive")),
    )


def _in_form(
    prompt: Prompt | None,
    sampling: SamplingParams,
    known: Mapping[str, object],
    think: Mapping[str, object],
) -> tuple[Prompt | None, SamplingParams]:
    """Prompt and sampling with the form of the answer that `format` demands."""
    form = read_format(known.get("format"))
    if isinstance(prompt, Chat):
        return replace(prompt, answer_format=form, template_options=think), sampling
    if form is None:
        return prompt, sampling
    return prompt, replace(sampling, grammar=answer_grammar(form))


def _known(
    body: Mapping[str, object], table: Mapping[str, Field], model: ServedModel
) -> dict[str, object]:
    known = fields_of(body, table, OTHER_WIRES, warnings)
    check_model(untagged(known.get("model")), model)
    return known


def untagged(name: object) -> str:
    """The name of a model without the tag `LATEST`. Raises FieldError for what is no name."""
    if not isinstance(name, str) or not name:
        raise FieldError("model: expected a model's name", param="model")
    return name.removesuffix(LATEST)
