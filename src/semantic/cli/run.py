"""`semantic run`: answers one prompt, or all requests of a JSON Lines file in one batch."""

from __future__ import annotations

import json
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Final, Protocol

import typer

from semantic.bootstrap import App
from semantic.cli.conversation import Message, has_chat_template, message
from semantic.cli.driving import Driver, Timing, succeeded
from semantic.cli.options import Adapter, AsJson, EngineOptions, MaxTokens, SamplingOptions
from semantic.cli.progress import ProgressBar
from semantic.cli.report import answer_json, to_line
from semantic.cli.terminal import piped_text, read_file, read_stdin, require_text, write
from semantic.composition.process_stores import require_chosen_store
from semantic.domain.errors import BackendError, InvalidRequestError, SemanticError
from semantic.domain.services import BlockPool
from semantic.domain.value_objects import CompletedGeneration, PoolView, SamplingParams, TokenEvent
from semantic.ports.generation import EngineEvent, Tokenizer

_SILENT_SECONDS: Final = 3.0
"""The time after which a run with a PROMPT stops to wait for an open pipe."""


def run(
    engine: EngineOptions,
    sampling: SamplingOptions,
    prompt: Annotated[
        str | None,
        typer.Argument(
            help="The prompt; a text from a pipe or a file in stdin follows it. Without PROMPT, "
            "or with -, that text is the prompt.",
            show_default=False,
        ),
    ] = None,
    file: Annotated[
        Path | None,
        typer.Option(
            help="Requests instead of PROMPT, one JSON object a line: prompt or messages; "
            "agent, max_tokens, temperature, top_p, top_k, min_p, seed and stop are optional.",
            show_default=False,
        ),
    ] = None,
    max_tokens: MaxTokens = 256,
    adapter: Adapter = None,
    chat: Annotated[
        bool | None,
        typer.Option(
            "--chat/--raw",
            help="Render prompts by the model's chat template, or not; by default if it has one.",
            show_default=False,
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Answer one prompt, or every request of a file in one batch.

    Streams text to stdout, answers of a file in the file's order. With --json each answer is one
    line with its tokens, usage, finish reason and timings.
    """
    defaults = Job("run", None, (), max_tokens, sampling.params())
    jobs = read_jobs(prompt, file, defaults)
    settings = engine.settings(adapter)
    require_chosen_store(settings)
    with ProgressBar() as progress:
        app = progress.load(settings)
        output: Output = JsonLines(settings.label) if as_json else PlainText()
        with closing(app.engine):
            if chat is None:
                chat = has_chat_template(app.tokenizer)
            answer(app, jobs, output, progress, chat=chat)


def answer(
    app: App, jobs: Sequence[Job], output: Output, progress: ProgressBar, *, chat: bool
) -> None:
    """Run all jobs in one batch. If a job fails, raises BackendError after the last job."""
    driver = Driver(app.engine)
    uids = [submit(app, driver, job, progress, chat=chat) for job in jobs]
    queue = AnswerQueue(uids, output, app.pool, driver.timings)
    for events in driver.steps():
        for event in events:
            progress.update(event)
            queue.add(event)
        if queue.ready:
            progress.hide_from_stdout()
            queue.flush()
    for job, done in zip(jobs, queue.completed(uids), strict=True):
        try:
            succeeded(done)
        except BackendError as error:
            raise BackendError(job.problem(error)) from error


def submit(app: App, driver: Driver, job: Job, progress: ProgressBar, *, chat: bool) -> str:
    """Queue one job. The message of an error names the job's line in the file."""
    try:
        tokens = job.tokens(app.tokenizer, chat=chat)
        uid = driver.submit(job.agent, tokens, job.max_tokens, job.sampling)
    except SemanticError as error:
        raise type(error)(job.problem(error)) from error
    progress.expect(uid, len(tokens))
    return uid


# Requests


@dataclass(frozen=True, slots=True)
class Job:
    """One request of a batch. `source` is the file and line that the request comes from."""

    agent: str
    prompt: str | None
    messages: tuple[Message, ...]
    max_tokens: int
    sampling: SamplingParams
    source: str = ""

    def tokens(self, tokenizer: Tokenizer, *, chat: bool) -> list[int]:
        """Return the prompt's token ids. `chat` applies the chat template. Raises
        InvalidRequestError if that fails."""
        if chat or self.prompt is None:
            given = self.messages or (message("user", self.prompt or ""),)
            return tokenizer.render_chat(given)
        return tokenizer.encode(self.prompt)

    def problem(self, error: Exception) -> str:
        """Return the message of `error` with the job's source before it."""
        return f"{self.source}: {error}" if self.source else str(error)


def read_jobs(prompt: str | None, file: Path | None, defaults: Job) -> list[Job]:
    """Return the jobs of the command line. Raises InvalidRequestError for a malformed job."""
    if prompt is not None and file is not None:
        raise InvalidRequestError("expected either a PROMPT or --file")
    if file is not None:
        return parse_lines(read_file(file), str(file), defaults)
    return [replace(defaults, prompt=require_text(_with_stdin(prompt)))]


def _with_stdin(prompt: str | None) -> str:
    if prompt == "-":
        return read_stdin().removesuffix("\n")  # the shell's own newline
    piped = piped_text(None if prompt is None else _SILENT_SECONDS)
    if prompt is None and piped is None:
        raise InvalidRequestError("expected a PROMPT, a text in stdin or --file")
    return "\n\n".join(filter(None, (prompt, (piped or "").removesuffix("\n"))))


def parse_lines(text: str, source: str, defaults: Job) -> list[Job]:
    """Return a job for each line of `text` that is not blank. `defaults` has values for missing
    fields. Raises InvalidRequestError for the first malformed line."""
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
        raise InvalidRequestError(f"{source} contains no request")
    return jobs


def _parse(line: str, defaults: Job) -> Job:
    try:
        fields = json.loads(line)
    except json.JSONDecodeError as error:
        raise InvalidRequestError(f"not JSON: {error.msg} at column {error.colno}") from error
    if not isinstance(fields, dict):
        raise InvalidRequestError(f"expected a JSON object, got {type(fields).__name__}")
    unknown = sorted(set(fields) - set(_FIELDS))
    if unknown:
        raise InvalidRequestError(
            f"unknown field {unknown[0]!r}; known are {', '.join(sorted(_FIELDS))}"
        )
    if ("prompt" in fields) == ("messages" in fields):
        raise InvalidRequestError("expected either prompt or messages")
    job = defaults
    for name, value in fields.items():
        job = _FIELDS[name](job, name, value)
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


def _sample(job: Job, sampling: SamplingParams) -> Job:
    return replace(job, sampling=sampling)


_FIELDS: Mapping[str, Callable[[Job, str, object], Job]] = {
    "agent": lambda job, name, value: replace(job, agent=_text(name, value)),
    "prompt": lambda job, name, value: replace(job, prompt=require_text(_text(name, value))),
    "messages": lambda job, name, value: replace(job, messages=_messages(name, value)),
    "max_tokens": lambda job, name, value: replace(job, max_tokens=_integer(name, value)),
    "temperature": lambda job, name, value: _sample(
        job, replace(job.sampling, temperature=_number(name, value))
    ),
    "top_p": lambda job, name, value: _sample(
        job, replace(job.sampling, top_p=_number(name, value))
    ),
    "top_k": lambda job, name, value: _sample(
        job, replace(job.sampling, top_k=_integer(name, value))
    ),
    "min_p": lambda job, name, value: _sample(
        job, replace(job.sampling, min_p=_number(name, value))
    ),
    "seed": lambda job, name, value: _sample(
        job, replace(job.sampling, seed=_integer(name, value))
    ),
    "stop": lambda job, name, value: _sample(job, replace(job.sampling, stop=_stop(name, value))),
}


# Answers


class Output(Protocol):
    """Writes the answers of a batch in order."""

    def text(self, text: str) -> None:
        """Write the next piece of the current answer."""

    def end(self, done: CompletedGeneration, timing: Timing, view: PoolView) -> None:
        """End the current answer. `timing` and `view` are the request's."""


class PlainText:
    """Writes the text of the answers, with a newline after each."""

    def text(self, text: str) -> None:
        write(text)

    def end(self, done: CompletedGeneration, timing: Timing, view: PoolView) -> None:
        del done, timing, view
        write("\n")


class JsonLines:
    """Writes a JSON document in one line for each complete answer."""

    def __init__(self, model: str) -> None:
        self._model = model

    def text(self, text: str) -> None:
        """See `Output.text`."""

    def end(self, done: CompletedGeneration, timing: Timing, view: PoolView) -> None:
        write(to_line(answer_json(self._model, done, timing, view)) + "\n")


@dataclass(slots=True)
class _Answer:
    pieces: list[str] = field(default_factory=list)
    done: CompletedGeneration | None = None
    view: PoolView | None = None


class AnswerQueue:
    """Holds events back, so that `output` gets the answers in the order of `uids`."""

    def __init__(
        self, uids: Iterable[str], output: Output, pool: BlockPool, timings: Mapping[str, Timing]
    ) -> None:
        self._pending = deque(uids)
        self._output = output
        self._pool = pool
        self._timings = timings
        self._answers: dict[str, _Answer] = defaultdict(_Answer)

    @property
    def ready(self) -> bool:
        """True if `flush` would write text."""
        if not self._pending:
            return False
        first = self._answers[self._pending[0]]
        return bool(first.pieces) or first.done is not None

    def add(self, event: EngineEvent) -> None:
        """Buffer the event's text or the end of its answer."""
        answer = self._answers[event.uid]
        if isinstance(event, TokenEvent):
            if event.text:
                answer.pieces.append(event.text)
        elif isinstance(event, CompletedGeneration):
            answer.done = event
            # Read now: the pool may evict an idle cache before `flush` writes the answer.
            answer.view = self._pool.view(event.agent_id)

    def flush(self) -> None:
        """Write all buffered text whose turn it is."""
        while self._pending:
            uid = self._pending[0]
            answer = self._answers[uid]
            self._output.text("".join(answer.pieces))
            answer.pieces.clear()
            if answer.done is None or answer.view is None:
                return
            self._output.end(answer.done, self._timings[uid], answer.view)
            self._pending.popleft()

    def completed(self, uids: Iterable[str]) -> list[CompletedGeneration]:
        ends = (self._answers[uid].done for uid in uids)
        return [done for done in ends if done is not None]
