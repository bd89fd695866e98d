"""`semantic chat`: a conversation with one agent, which can be resumed after a restart.

Its cache stays in the engine between turns, and in the store between runs.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from typing import Annotated

import typer

from semantic.bootstrap import App
from semantic.cli.conversation import Conversation, has_chat_template
from semantic.cli.driving import Driver, Timing, succeeded
from semantic.cli.edge import EXIT_INTERRUPTED, print_error, print_notice
from semantic.cli.options import EngineOptions, MaxTokens, SamplingOptions
from semantic.cli.progress import ProgressBar
from semantic.cli.report import show_bytes, show_name, show_seconds, store_lines
from semantic.cli.shell.completion import complete_agents
from semantic.cli.terminal import (
    is_interactive,
    on_interrupt,
    require_text,
    stdin_lines,
    write,
)
from semantic.domain.errors import InvalidRequestError, SemanticError
from semantic.domain.value_objects import CompletedGeneration, SamplingParams, TokenEvent

_HELP = """\
/usage   blocks, bytes, cached tokens, time to first token, and the store
/reset   forget the conversation and its cache, on disk too
/exit    end the conversation; so does Ctrl-D
Ctrl-C   stop the answer
"""


def chat(
    engine: EngineOptions,
    sampling: SamplingOptions,
    agent: Annotated[
        str, typer.Option(help="The agent's name.", autocompletion=complete_agents)
    ] = "agent",
    system: Annotated[
        str | None, typer.Option(help="A system message to begin with.", show_default=False)
    ] = None,
    max_tokens: MaxTokens = 512,
    new: Annotated[
        bool, typer.Option("--new", help="Forget the conversation and start a new one.")
    ] = False,
) -> None:
    """Talk with an agent. Only what is new in a turn is prefilled.

    The conversation is resumed in the next run, unless --no-store is given.

    Commands are /usage, /reset, /help and /exit; Ctrl-C stops an answer. From a pipe each line
    is one turn, and the first one that fails ends the conversation.
    """
    params = sampling.params()
    with ProgressBar() as progress:
        app = progress.load(engine.settings())
    with closing(app.engine):
        session = ChatSession(app, agent, begin(app, system), max_tokens, params)
        if new:
            session.reset()
        else:
            session.resume()
        if is_interactive():
            write("/help lists the commands.\n")
            _converse(session)
        else:
            for line in stdin_lines():
                if not session.handle(line):
                    break


def begin(app: App, system: str | None) -> Conversation:
    """A new conversation. Raises InvalidRequestError for a model without a chat template."""
    if not has_chat_template(app.tokenizer):
        raise InvalidRequestError(
            "this model has no chat template; `semantic run` sends it plain text"
        )
    return Conversation(app.tokenizer, None if system is None else require_text(system))


class ChatSession:
    """The conversation with one agent, driven by lines of input."""

    def __init__(
        self,
        app: App,
        agent: str,
        conversation: Conversation,
        max_tokens: int,
        sampling: SamplingParams,
    ) -> None:
        self.agent = agent
        self._app = app
        self._conversation = conversation
        self._max_tokens = max_tokens
        self._sampling = sampling
        self._driver = Driver(app.engine)
        self._last: tuple[CompletedGeneration, Timing] | None = None

    def handle(self, line: str) -> bool:
        """Carry out a command or send a message; False after /exit.

        Raises SemanticError when the turn fails; the conversation is then unchanged.
        """
        match line.strip():
            case "":
                pass
            case "/exit":
                return False
            case "/help":
                write(_HELP)
            case "/reset":
                self.reset()
            case "/usage":
                write("\n".join(self.usage()) + "\n")
            case command if command.startswith("/"):
                raise InvalidRequestError(f"unknown command {command!r}; /help lists them")
            case _:
                self._answer(line)
        return True

    def cancel(self) -> None:
        """Cancel the current answer; it ends at the next step."""
        self._driver.cancel_all()

    def reset(self) -> None:
        """Forget all messages but the system message, and the agent's cache and manifest."""
        self._conversation.reset()
        self._app.engine.forget(self.agent)
        self._last = None

    def resume(self) -> None:
        """Continue the agent's conversation if it is stored; on a terminal, show its last answer.

        Raises InvalidRequestError when it began with another system message.
        """
        manifest = self._app.engine.manifest(self.agent)
        if manifest is None:
            return
        name = show_name(self.agent)
        if not self._conversation.resume(manifest):
            print_notice(f"the conversation of {name} cannot be read; it begins without a history")
            return
        if is_interactive():
            last = show_name(self._conversation.messages[-1]["content"])
            write(f"resuming {name}: {len(manifest.token_ids)} tokens, last answer {last!r}\n")

    def usage(self) -> Iterator[str]:
        """Size of the agent's cache, cost of its last turn, and size of the store."""
        view = self._app.pool.view(self.agent)
        yield f"{show_name(self.agent)}: {view.n_blocks} blocks, {show_bytes(view.n_bytes)}"
        yield from self._last_turn()
        yield from store_lines(self._app.store.stats())

    def _last_turn(self) -> Iterator[str]:
        if self._last is None:
            yield "no turn yet"
            return
        done, timing = self._last
        new = done.prompt_tokens - done.cached_tokens
        yield (
            f"last turn: {done.prompt_tokens} prompt tokens, {done.cached_tokens} cached, "
            f"{new} prefilled; {done.generated_tokens} generated"
        )
        rate = "-" if timing.decode_rate is None else f"{timing.decode_rate:.0f}"
        yield f"TTFT {show_seconds(timing.ttft)}, then {rate} tokens/s"

    def _answer(self, question: str) -> None:
        prompt = self._conversation.next_prompt(require_text(question))
        uid = self._driver.submit(
            self.agent,
            prompt,
            self._max_tokens,
            self._sampling,
            note=self._conversation.note(question),
        )
        done = self._stream(uid)
        self._last = succeeded(done), self._driver.timings.pop(uid)
        # A turn cancelled before its first token is not recorded.
        if done.tokens:
            self._conversation.add_turn(question, done.text, done.tokens)

    def _stream(self, uid: str) -> CompletedGeneration:
        """Write the answer as it is generated."""
        written = ""
        for events in self._driver.steps():
            for event in events:
                if isinstance(event, TokenEvent):
                    write(event.text)
                    written += event.text
                elif isinstance(event, CompletedGeneration) and event.uid == uid:
                    mark = " [cancelled]" if event.finish_reason == "cancelled" else ""
                    write(f"{event.text.removeprefix(written)}{mark}\n")
                    return event
        raise KeyError(uid)


def _converse(session: ChatSession) -> None:
    """Read turns from a terminal until /exit, Ctrl-D, or Ctrl-C twice."""
    import readline  # noqa: F401  gives `input` editing and a history

    interrupted = False
    while True:
        try:
            line = input("> ")
        except EOFError:
            write("\n")
            return
        except KeyboardInterrupt as interrupt:
            write("\n")
            if interrupted:
                raise typer.Exit(EXIT_INTERRUPTED) from interrupt
            interrupted = True
            write("Ctrl-C again, or /exit, ends the conversation.\n")
            continue
        interrupted = False
        try:
            with on_interrupt(session.cancel):
                if not session.handle(line):
                    return
        except SemanticError as error:
            print_error(error)
