"""`semantic run`: answers one prompt, or all requests of a file in one batch."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from semantic.bootstrap import App
from semantic.cli.conversation import has_chat_template
from semantic.cli.driving import Driver, succeeded
from semantic.cli.jobs import Job, parse_lines, require_text
from semantic.cli.options import AsJson, EngineOptions, MaxTokens, SamplingOptions
from semantic.cli.output import AnswerQueue, JsonLines, Output, PlainText
from semantic.cli.progress import ProgressBar
from semantic.cli.terminal import read_file, read_stdin
from semantic.domain.errors import BackendError, InvalidRequestError, SemanticError


def run(
    engine: EngineOptions,
    sampling: SamplingOptions,
    prompt: Annotated[
        str | None,
        typer.Argument(help="The prompt; - reads it from stdin.", show_default=False),
    ] = None,
    file: Annotated[
        Path | None,
        typer.Option(
            help="Requests instead of PROMPT, one JSON object a line: prompt or messages; "
            "agent, max_tokens, temperature, top_p, top_k, min_p, seed and stop may be given.",
            show_default=False,
        ),
    ] = None,
    max_tokens: MaxTokens = 256,
    chat: Annotated[
        bool | None,
        typer.Option(
            "--chat/--raw",
            help="Whether prompts go through the model's chat template; they do when it has one.",
            show_default=False,
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Answer one prompt, or every request of a file in one batch.

    Text goes to stdout as it is generated, answers of a file in the file's order. With --json
    each answer is one line with its tokens, usage, finish reason and timings.
    """
    defaults = Job("run", None, (), max_tokens, sampling.params())
    jobs = read_jobs(prompt, file, defaults)
    settings = engine.settings()
    with ProgressBar() as progress:
        app = progress.load(settings)
        output: Output = JsonLines(settings.model) if as_json else PlainText()
        with closing(app.engine):
            if chat is None:
                chat = has_chat_template(app.tokenizer)
            answer(app, jobs, output, progress, chat=chat)


def read_jobs(prompt: str | None, file: Path | None, defaults: Job) -> list[Job]:
    """What to run. Raises InvalidRequestError when it is unclear or wrong."""
    if (prompt is None) == (file is None):
        raise InvalidRequestError("expected either a PROMPT (- for stdin) or --file")
    if file is not None:
        return parse_lines(read_file(file), str(file), defaults)
    if prompt == "-":
        # The shell's last newline is not part of what was meant.
        prompt = read_stdin().removesuffix("\n")
    return [replace(defaults, prompt=require_text(prompt or ""))]


def answer(
    app: App, jobs: Sequence[Job], output: Output, progress: ProgressBar, *, chat: bool
) -> None:
    """Run all jobs in one batch. Raises BackendError, after the others ended, when one failed."""
    driver = Driver(app.engine)
    uids = [submit(app, driver, job, progress, chat=chat) for job in jobs]
    queue = AnswerQueue(uids, output, app.pool, driver.timings)
    for events in driver.steps():
        for event in events:
            progress.note(event)
            queue.note(event)
        if queue.ready:
            progress.make_way()
            queue.flush()
    for job, done in zip(jobs, queue.completed(uids), strict=True):
        try:
            succeeded(done)
        except BackendError as error:
            raise BackendError(job.problem(error)) from error


def submit(app: App, driver: Driver, job: Job, progress: ProgressBar, *, chat: bool) -> str:
    """Queue one job; an error says where the job was read."""
    try:
        tokens = job.tokens(app.tokenizer, chat=chat)
        uid = driver.submit(job.agent, tokens, job.max_tokens, job.sampling)
    except SemanticError as error:
        raise type(error)(job.problem(error)) from error
    progress.expect(uid, len(tokens))
    return uid
