"""POST /v1/completions."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Final, Literal

from fastapi import APIRouter, Request
from starlette.responses import Response

from semantic.application.chat.call_grammar import answer_grammar
from semantic.domain.answer import (
    AnswerEnd,
    AnswerEvent,
    AnswerStarted,
    PromptScored,
    TextDelta,
    Usage,
)
from semantic.domain.value_objects import SamplingParams, TokenLogprob
from semantic.ports.serving import Ask, ServedModel, ServingPort
from semantic_server.http.context import serving_of
from semantic_server.http.errors import FieldError, check_finished
from semantic_server.http.openai.fields import COMPLETION_FIELDS, Json, known_fields
from semantic_server.http.openai.replies import (
    IndexedEvent,
    Reply,
    ReplyKind,
    finite,
    merged_events,
    openai_body,
    texts_of,
)
from semantic_server.http.openai.requests import (
    Caller,
    StreamOptions,
    caller_of,
    check_model,
    choices_of,
    constraint_of,
    number_of_choices,
    sampling_of,
    stream_options,
    without_elements,
)
from semantic_server.http.openai.validators import CompletionBody, completion_adapter
from semantic_server.http.request_body import on_thread, read_json, validated
from semantic_server.http.request_fields.table import at_least_one

FinishReason = Literal["stop", "length"]


@dataclass(slots=True)
class LegacyLogprobs:
    """Log-probabilities as four lists with one entry per token. `text_offset` counts characters of
    the choice's text."""

    tokens: list[str] = field(default_factory=list)
    token_logprobs: list[float | None] = field(default_factory=list)
    top_logprobs: list[dict[str, float] | None] = field(default_factory=list)
    text_offset: list[int] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.tokens)

    def extend(self, more: LegacyLogprobs) -> None:
        """Append the four entries of each of the next tokens."""
        self.tokens += more.tokens
        self.token_logprobs += more.token_logprobs
        self.top_logprobs += more.top_logprobs
        self.text_offset += more.text_offset

    def as_object(self) -> Json:
        """Return the member `logprobs` of a choice."""
        return {
            "tokens": self.tokens,
            "token_logprobs": self.token_logprobs,
            "top_logprobs": self.top_logprobs,
            "text_offset": self.text_offset,
        }


@dataclass(frozen=True, slots=True)
class CompletionDelta:
    """An addition to choice number `index`. Only a choice's last delta has a `usage`."""

    index: int
    text: str = ""
    logprobs: LegacyLogprobs = field(default_factory=LegacyLogprobs)
    finish_reason: FinishReason | None = None
    usage: Usage | None = None

    def as_object(self) -> Json:
        """Return this delta as a member of `choices`."""
        return {
            "index": self.index,
            "text": self.text,
            "logprobs": self.logprobs.as_object() if self.logprobs else None,
            "finish_reason": self.finish_reason,
        }


# Events to deltas


async def completion_deltas(
    events: AsyncGenerator[IndexedEvent, None], serving: ServingPort, request: CompletionRequest
) -> AsyncGenerator[CompletionDelta, None]:
    """Yield the deltas of all choices. Raises WireError for a failed answer."""
    choices = [
        _Choice(index, request.prompts[index // request.n], request, serving)
        for index in range(len(request.choices))
    ]
    async with aclosing(events):
        async for index, event in events:
            delta = await choices[index].delta(event)
            if delta is not None:
                yield delta


@dataclass(slots=True)
class _Choice:
    index: int
    prompt: TextPrompt
    request: CompletionRequest
    serving: ServingPort
    n_characters: int = 0
    n_scored: int = 0

    async def delta(self, event: AnswerEvent) -> CompletionDelta | None:
        match event:
            case AnswerStarted():
                return await self._started()
            case PromptScored():
                return await self._prompt_scored(event)
            case TextDelta():
                return None if self.request.only_score else await self._text(event)
            case AnswerEnd():
                return self._end(event)
            case _:
                return None

    async def _started(self) -> CompletionDelta:
        """Return the first delta of every choice, with the echoed prompt if there is one."""
        echo = self.request.echo and not self.request.logprobs
        return self._delta(await self._prompt_text() if echo else "")

    async def _prompt_scored(self, event: PromptScored) -> CompletionDelta:
        text = await self._prompt_text()
        logprobs = await _logprobs(self.serving, event.tokens, event.logprobs, 0, len(text))
        return self._delta(text, logprobs)

    async def _text(self, event: TextDelta) -> CompletionDelta:
        tokens = [one.token for one in event.logprobs]
        self.n_scored += len(tokens)
        logprobs = await _logprobs(
            self.serving, tokens, event.logprobs, self.n_characters, len(event.text)
        )
        return self._delta(event.text, logprobs)

    async def _prompt_text(self) -> str:
        if isinstance(self.prompt, str):
            return self.prompt
        return await self.serving.detokenize(self.prompt)

    def _delta(self, text: str, logprobs: LegacyLogprobs | None = None) -> CompletionDelta:
        self.n_characters += len(text)
        return CompletionDelta(self.index, text, logprobs or LegacyLogprobs())

    def _end(self, end: AnswerEnd) -> CompletionDelta:
        check_finished(end)
        if self.request.only_score:
            usage = replace(end.usage, completion=0)
            return CompletionDelta(self.index, finish_reason="length", usage=usage)
        reason: FinishReason = "length" if end.reason == "length" else "stop"
        textless = self._textless(end.usage.completion)
        return CompletionDelta(self.index, logprobs=textless, finish_reason=reason, usage=end.usage)

    def _textless(self, completion: int) -> LegacyLogprobs:
        """Return empty entries for tokens without text. Clients that score a prompt need an entry
        for every token."""
        if not (self.request.echo and self.request.logprobs):
            return LegacyLogprobs()
        n = max(completion - self.n_scored, 0)
        return LegacyLogprobs([""] * n, [None] * n, [None] * n, [self.n_characters] * n)


async def _logprobs(
    serving: ServingPort,
    tokens: Sequence[int],
    logprobs: Sequence[TokenLogprob | None],
    offset: int,
    length: int,
) -> LegacyLogprobs:
    """Return the log-probabilities of `tokens`. The tokens' text begins at `offset` of the choice's
    text, and has `length` characters."""
    texts = await texts_of(serving, tokens, logprobs)
    found = LegacyLogprobs()
    end = offset + length
    for token, logprob in zip(tokens, logprobs, strict=True):
        found.tokens.append(texts[token])
        found.token_logprobs.append(None if logprob is None else finite(logprob.logprob))
        found.top_logprobs.append(None if logprob is None else _by_text(logprob, texts))
        found.text_offset.append(min(offset, end))
        offset += len(texts[token])
    return found


def _by_text(logprob: TokenLogprob, texts: Mapping[int, str]) -> dict[str, float]:
    """Map the text of each candidate token to its log-probability. For equal texts, the higher
    log-probability counts."""
    found: dict[str, float] = {}
    for token, value in (*logprob.top, (logprob.token, logprob.logprob)):
        text = texts[token]
        found[text] = max(finite(value), found.get(text, finite(value)))
    return found


# The sum of deltas


@dataclass(slots=True)
class _Text:
    fragments: list[str] = field(default_factory=list)
    logprobs: LegacyLogprobs = field(default_factory=LegacyLogprobs)
    finish_reason: FinishReason | None = None

    def add(self, delta: CompletionDelta) -> None:
        self.fragments.append(delta.text)
        self.logprobs.extend(delta.logprobs)
        self.finish_reason = delta.finish_reason or self.finish_reason

    def as_object(self, index: int) -> Json:
        text = "".join(self.fragments)
        return CompletionDelta(index, text, self.logprobs, self.finish_reason).as_object()


COMPLETION_REPLY: Final = ReplyKind("cmpl", "text_completion", "text_completion", _Text)


_DEFAULT_MAX_TOKENS: Final = 16
"""OpenAI's documented default."""

_MAX_LOGPROBS: Final = 5

TextPrompt = str | tuple[int, ...]
"""A prompt as text or as token ids."""


@dataclass(frozen=True, slots=True)
class CompletionRequest:
    """`n` completions of each prompt. With `only_score`, the reply omits the one token that the
    engine must generate."""

    prompts: tuple[TextPrompt, ...]
    choices: tuple[Ask, ...]
    n: int
    options: StreamOptions
    echo: bool = False
    logprobs: bool = False
    only_score: bool = False


def completion_request(
    body: Mapping[str, object], model: ServedModel, caller: Caller
) -> CompletionRequest:
    """Parse `body`. Raises InvalidRequestError and ModelNotFoundError."""
    known = known_fields(body, COMPLETION_FIELDS)
    prompts = _prompts(known.get("prompt"), model.vocab_size)
    checked = validated(completion_adapter(), without_elements(known))
    check_model(checked["model"], model)
    n = number_of_choices(checked.get("n"), len(prompts))
    _check_best_of(checked.get("best_of"), n)
    echo = bool(checked.get("echo"))
    max_tokens = _max_tokens(checked.get("max_tokens"), echo=echo)
    sampling = sampling_of(checked, known.get("stop"), model)
    sampling = _with_logprobs(sampling, checked)
    form = constraint_of(known)
    if form is not None:
        sampling = replace(sampling, grammar=answer_grammar(form))
    return CompletionRequest(
        prompts,
        choices_of(prompts, n, sampling, max(max_tokens, 1), caller),
        n,
        stream_options(known, force_usage=caller.force_usage),
        echo=echo,
        logprobs=checked.get("logprobs") is not None,
        only_score=max_tokens == 0,
    )


def _prompts(value: object, vocab_size: int) -> tuple[TextPrompt, ...]:
    if isinstance(value, list) and value and not _are_ids(value):
        return tuple(_prompt(f"prompt[{i}]", one, vocab_size) for i, one in enumerate(value))
    return (_prompt("prompt", value, vocab_size),)


def _prompt(path: str, value: object, vocab_size: int) -> TextPrompt:
    if isinstance(value, str) and value:
        return value
    if isinstance(value, list) and value and _are_ids(value):
        _check_ids(path, value, vocab_size)
        return tuple(value)
    empty = value in ("", [])
    expected = "it must not be empty" if empty else "expected a string or token ids"
    raise FieldError(f"{path}: {expected}", param=path)


def _are_ids(values: Sequence[object]) -> bool:
    return all(type(one) is int for one in values)


def _check_ids(path: str, ids: Sequence[int], vocab_size: int) -> None:
    wrong = next((i for i, one in enumerate(ids) if not 0 <= one < vocab_size), None)
    if wrong is not None:
        at = f"{path}[{wrong}]"
        raise FieldError(f"{at}: token ids must be 0 or more and below {vocab_size}", param=at)


def _check_best_of(best_of: int | None, n: int) -> None:
    if best_of not in {None, n}:
        raise FieldError(
            f"best_of must equal n ({n}): replies have all choices, got {best_of}", param="best_of"
        )


def _max_tokens(value: int | None, *, echo: bool) -> int:
    if value is None:
        return _DEFAULT_MAX_TOKENS
    if value == 0 and echo:
        return 0
    at_least_one("max_tokens", value)
    return value


def _with_logprobs(sampling: SamplingParams, body: CompletionBody) -> SamplingParams:
    top = body.get("logprobs")
    if top is None:
        return sampling
    if not 0 <= top <= _MAX_LOGPROBS:
        raise FieldError(
            f"logprobs must be between 0 and {_MAX_LOGPROBS}, got {top}", param="logprobs"
        )
    return replace(sampling, logprobs=top, prompt_logprobs=top if body.get("echo") else None)


router: Final = APIRouter(tags=["openai"])


@router.post("/api/v0/completions", include_in_schema=False)
@router.post("/v1/completions", openapi_extra=openai_body("prompt"))
async def create_completion(request: Request) -> Response:
    """Continue a text or token ids, as OpenAI's completions do."""
    body = await read_json(request)
    serving = serving_of(request, body.get("model"))
    caller = caller_of(request, body)
    parsed = await on_thread(request, completion_request, body, serving.model, caller)
    deltas = completion_deltas(merged_events(serving, parsed.choices), serving, parsed)
    reply = Reply(COMPLETION_REPLY, serving.model, parsed.options, n=parsed.n)
    return await reply.respond(request, deltas)
