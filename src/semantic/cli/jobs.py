"""What `semantic run` is asked to do: one prompt, or a file with one JSON object a line.

Everything is checked here, before a model is loaded. Knows no engine.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from semantic.cli.conversation import Message, message
from semantic.domain.errors import InvalidRequestError
from semantic.domain.value_objects import SamplingParams
from semantic.ports.outbound import Tokenizer


@dataclass(frozen=True, slots=True)
class Job:
    """One request: a prompt or messages, and how to answer. `source` is where it was read."""

    agent: str
    prompt: str | None
    messages: tuple[Message, ...]
    max_tokens: int
    sampling: SamplingParams
    source: str = ""

    def tokens(self, tokenizer: Tokenizer, *, chat: bool) -> list[int]:
        """The prompt's token ids; by the chat template when `chat`.

        Raises InvalidRequestError when there is no template or it refuses the messages.
        """
        if chat or self.prompt is None:
            given = self.messages or (message("user", self.prompt or ""),)
            return tokenizer.render_chat(given)
        return tokenizer.encode(self.prompt)

    def problem(self, error: Exception) -> str:
        """The error's message with where the job was read."""
        return f"{self.source}: {error}" if self.source else str(error)


def parse_lines(text: str, source: str, defaults: Job) -> list[Job]:
    """A job for each line that is not blank; `defaults` for the fields it does not give.

    Raises InvalidRequestError naming the first line that is wrong.
    """
    jobs = []
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip():
            continue
        where = f"{source}, line {number}"
        try:
            jobs.append(_parse(line, replace(defaults, agent=f"line-{number}", source=where)))
        except InvalidRequestError as error:
            raise InvalidRequestError(f"{where}: {error}") from error
    if not jobs:
        raise InvalidRequestError(f"{source} holds no request")
    return jobs


def require_text(prompt: str) -> str:
    """`prompt`, unless there is nothing in it that a model could read."""
    if not prompt:
        raise InvalidRequestError("the prompt is empty")
    try:
        prompt.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequestError("the prompt is no UTF-8 text") from error
    return prompt


def _parse(line: str, defaults: Job) -> Job:
    try:
        fields = json.loads(line)
    except json.JSONDecodeError as error:
        raise InvalidRequestError(f"no JSON: {error.msg} at column {error.colno}") from error
    if not isinstance(fields, dict):
        raise InvalidRequestError(f"expected a JSON object, got {type(fields).__name__}")
    unknown = sorted(set(fields) - set(_READERS))
    if unknown:
        raise InvalidRequestError(
            f"unknown field {unknown[0]!r}; known are {', '.join(sorted(_READERS))}"
        )
    if ("prompt" in fields) == ("messages" in fields):
        raise InvalidRequestError("expected either prompt or messages")
    job = defaults
    for name, value in fields.items():
        job = _READERS[name](job, name, value)
    return job


def _text(name: str, value: object) -> str:
    if not isinstance(value, str):
        raise _wrong(name, "a string", value)
    return value


def _integer(name: str, value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool):
        raise _wrong(name, "an integer", value)
    return value


def _number(name: str, value: object) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise _wrong(name, "a number", value)
    return value


def _message(value: object) -> Message:
    if not isinstance(value, dict) or set(value) != {"role", "content"}:
        raise _wrong("messages", 'objects with "role" and "content"', value)
    return message(_text("role", value["role"]), _text("content", value["content"]))


def _messages(name: str, value: object) -> tuple[Message, ...]:
    if not isinstance(value, list) or not value:
        raise _wrong(name, "a list of messages", value)
    return tuple(_message(one) for one in value)


def _stop(name: str, value: object) -> tuple[str, ...]:
    values: Sequence[object] = value if isinstance(value, list) else [value]
    return tuple(_text(name, one) for one in values)


def _wrong(name: str, expected: str, value: object) -> InvalidRequestError:
    return InvalidRequestError(f"{name} must be {expected}, got {json.dumps(value)}")


Reader = Callable[[Job, str, object], Job]

_READERS: dict[str, Reader] = {
    "agent": lambda job, name, value: replace(job, agent=_text(name, value)),
    "prompt": lambda job, name, value: replace(job, prompt=require_text(_text(name, value))),
    "messages": lambda job, name, value: replace(job, messages=_messages(name, value)),
    "max_tokens": lambda job, name, value: replace(job, max_tokens=_integer(name, value)),
    "temperature": lambda job, name, value: _sampled(
        job, replace(job.sampling, temperature=_number(name, value))
    ),
    "top_p": lambda job, name, value: _sampled(
        job, replace(job.sampling, top_p=_number(name, value))
    ),
    "top_k": lambda job, name, value: _sampled(
        job, replace(job.sampling, top_k=_integer(name, value))
    ),
    "min_p": lambda job, name, value: _sampled(
        job, replace(job.sampling, min_p=_number(name, value))
    ),
    "seed": lambda job, name, value: _sampled(
        job, replace(job.sampling, seed=_integer(name, value))
    ),
    "stop": lambda job, name, value: _sampled(job, replace(job.sampling, stop=_stop(name, value))),
}


def _sampled(job: Job, sampling: SamplingParams) -> Job:
    return replace(job, sampling=sampling)
