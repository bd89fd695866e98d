"""The conversation with one agent. Each line of input is a message or a command."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from semantic.cli.dialogue.answer_writer import AnswerWriter, answer_writer
from semantic.cli.driving import Timing
from semantic.cli.edge import print_notice
from semantic.cli.progress import ProgressBar
from semantic.cli.report import show_bytes, show_name, show_seconds, store_lines
from semantic.cli.terminal import is_interactive, require_text, write
from semantic.domain.answer import AnswerEvent, PromptProgress, ReasoningDelta, TextDelta
from semantic.domain.chat import Message
from semantic.domain.errors import AgentNotFoundError, InvalidRequestError, OperatorError
from semantic.domain.value_objects import SamplingParams
from semantic.library.answers import Answer
from semantic.library.chat_options import Messages
from semantic.library.engine import AnswerStream, Engine

_HELP: Final = """\
/system [TEXT]  show the system message, or continue with another one
/fork NAME      go on as a new agent with this conversation; this one stays as it is
/why            how much of the last prompt the cache had, and why not more
/save FILE      write the conversation to a new file, as Markdown or, named *.json, as JSON
/usage          blocks, bytes, cached tokens, time to first token, and the store
/reset          forget the conversation and its cache, on disk too
/exit           end the conversation; so does Ctrl-D
Ctrl-C          stop the answer
A line that ends with \\ continues in the next one; pasted lines are one message.
"""


class ChatSession:
    def __init__(
        self, engine: Engine, agent: str, max_tokens: int, sampling: SamplingParams
    ) -> None:
        self._engine = engine
        self._agent = engine.agent(agent)
        self._max_tokens = max_tokens
        self._sampling = sampling
        self._last: tuple[Answer, Timing] | None = None
        self._stream: AnswerStream | None = None
        self._is_cancelled = False
        self._begun: tuple[Message, ...] | None = None

    def handle(self, line: str) -> bool:
        """Carry out a command or send a message. Returns False after /exit. Raises SemanticError if
        that fails."""
        text = line.strip()
        if not text:
            return True
        if not text.startswith("/"):
            self._answer(line)
            return True
        word, _, given = text.partition(" ")
        if word == "/exit" and not given:
            return False
        self._carry_out(word, given.strip())
        return True

    def cancel(self) -> None:
        """Cancel the current answer. A signal handler may call this."""
        self._is_cancelled = True
        if self._stream is not None:
            self._stream.cancel()

    def begin(self, system: str | None, *, new: bool) -> None:
        """Continue the agent's stored conversation, unless `new` is set. Without one, begin with
        the system message `system`. Raises InvalidRequestError if the stored conversation has
        another system message."""
        if new:
            self._agent.forget()
        name = show_name(self._agent.name)
        try:
            history = self._agent.history()
        except InvalidRequestError:
            print_notice(f"cannot read the conversation of {name}; starting without a history")
            self._begun = () if system is None else (Message("system", system),)
            return
        if not history:
            self._agent.set_system(system)
            return
        if system not in (None, _system_of(history)):
            raise InvalidRequestError("it began with another system message; --new starts afresh")
        if is_interactive():
            tokens = self._agent.info().summary.tokens
            last = show_name(history[-1].content)
            write(f"resuming {name}: {tokens} tokens, last answer {last!r}\n")

    # Commands

    def _carry_out(self, word: str, given: str) -> None:
        match word, bool(given):
            case "/help", False:
                write(_HELP)
            case "/usage", False:
                write("\n".join(self._usage()) + "\n")
            case "/why", False:
                self._why()
            case "/reset", False:
                self._agent.forget()
                self._last = None
            case "/system", False:
                system = _system_of(self._history())
                write("no system message\n" if system is None else f"{_shown(system)}\n")
            case "/system", True:
                self._set_system(require_text(given))
            case "/fork", True:
                self._fork(given)
            case "/save", True:
                self._save(Path(given))
            case (("/fork" | "/save"), False):
                what = "the new agent's NAME" if word == "/fork" else "a FILE"
                raise InvalidRequestError(f"expected {what} after {word}")
            case _:
                command = f"{word} {given}".strip()
                raise InvalidRequestError(f"unknown command {command!r:.80}; /help lists them")

    def _set_system(self, text: str) -> None:
        if self._begun is None:
            self._agent.set_system(text)
        else:
            self._begun = (Message("system", text),)

    def _fork(self, name: str) -> None:
        try:
            self._agent = self._agent.fork(name)
        except AgentNotFoundError as error:
            raise InvalidRequestError("there is no turn to fork yet") from error
        write(f"going on as {show_name(name)}\n")

    def _why(self) -> None:
        try:
            lines = self._agent.why().splitlines()
        except AgentNotFoundError:
            lines = ["no turn yet"]
        write("".join(f"{show_name(line, whole=True)}\n" for line in lines))

    def _save(self, path: Path) -> None:
        messages = self._history()
        text = _as_json(messages) if path.suffix == ".json" else _as_markdown(messages)
        try:
            with path.open("x", encoding="utf-8") as file:
                file.write(text)
        except FileExistsError as error:
            raise InvalidRequestError(f"{path} already exists; expected a new file") from error
        except OSError as error:
            raise OperatorError(f"cannot write {path}: {error.strerror}") from error
        write(f"{len(messages)} messages in {path}\n")

    def _usage(self) -> Iterator[str]:
        name = show_name(self._agent.name)
        try:
            summary = self._agent.info().summary
            blocks = sum(summary.blocks.values())
            yield (
                f"{name}: {summary.tokens} tokens in {blocks} blocks, {show_bytes(summary.n_bytes)}"
            )
        except AgentNotFoundError:
            yield f"{name}: 0 tokens in 0 blocks, 0 bytes"
        yield from self._last_turn()
        yield from store_lines(self._engine.stores())

    def _last_turn(self) -> Iterator[str]:
        if self._last is None:
            yield "no turn yet"
            return
        answer, timing = self._last
        usage = answer.usage
        yield (
            f"last turn: {usage.prompt} prompt tokens, {usage.cached} cached, "
            f"{usage.prompt - usage.cached} prefilled; {usage.completion} generated"
        )
        rate = "-" if timing.decode_rate is None else f"{timing.decode_rate:.0f}"
        yield f"TTFT {show_seconds(timing.ttft)}, then {rate} tokens/s"

    def _history(self) -> tuple[Message, ...]:
        return self._agent.history() if self._begun is None else self._begun

    # Turns

    def _answer(self, question: str) -> None:
        asked: Messages = require_text(question)
        if self._begun is not None:
            asked = [*self._begun, Message("user", question)]
        self._is_cancelled = False
        timing = Timing(time.perf_counter())
        with self._agent.chat(
            asked, stream=True, max_tokens=self._max_tokens, sampling=self._sampling
        ) as stream:
            self._stream = stream
            if self._is_cancelled:
                stream.cancel()
            try:
                self._write(stream, timing)
            finally:
                self._stream = None
        self._begun = None
        timing.ended = time.perf_counter()
        timing.n_tokens = stream.answer.usage.completion
        self._last = stream.answer, timing

    def _write(self, stream: AnswerStream, timing: Timing) -> None:
        writer = answer_writer()
        with ProgressBar() as progress, writer:
            for event in stream.events():
                if isinstance(event, PromptProgress):
                    progress.prefill("", event.done, event.total)
                elif isinstance(event, TextDelta | ReasoningDelta):
                    progress.hide()
                    if timing.first_token is None:
                        timing.first_token = time.perf_counter()
                    _write_piece(writer, event)
            writer.end(" [cancelled]" if stream.answer.finish_reason == "cancelled" else "")


def _write_piece(writer: AnswerWriter, event: AnswerEvent) -> None:
    if isinstance(event, TextDelta):
        writer.text(event.text)
    elif isinstance(event, ReasoningDelta):
        writer.thought(event.text)


def _system_of(history: Sequence[Message]) -> str | None:
    first = history[:1]
    return first[0].content if first and first[0].role == "system" else None


def _shown(text: str) -> str:
    return "\n".join(show_name(line, whole=True) for line in text.splitlines())


def _as_markdown(messages: Sequence[Message]) -> str:
    return "\n\n".join(f"**{one.role}**\n\n{one.content}" for one in messages) + "\n"


def _as_json(messages: Sequence[Message]) -> str:
    found = [{"role": one.role, "content": one.content} for one in messages]
    return json.dumps(found, ensure_ascii=False, indent=2) + "\n"
