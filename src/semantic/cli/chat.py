"""`semantic chat`: a conversation with one agent that resumes after a restart."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Annotated

import typer

from semantic.cli.edge import EXIT_INTERRUPTED, print_error
from semantic.cli.options import Adapter, EngineOptions, MaxTokens, SamplingOptions
from semantic.cli.progress import ProgressBar, print_store_unavailable
from semantic.cli.shell.completion import complete_agents
from semantic.cli.terminal import is_interactive, on_signals, require_text, stdin_lines, write
from semantic.composition.process_stores import require_chosen_store
from semantic.domain.errors import InvalidRequestError, SemanticError

if TYPE_CHECKING:
    from semantic.cli.dialogue.chat_session import ChatSession
    from semantic.library.engine import Engine


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
    adapter: Adapter = None,
    new: Annotated[
        bool, typer.Option("--new", help="Forget the conversation and start a new one.")
    ] = False,
) -> None:
    """Talk with an agent. A turn prefills only its new tokens.

    The next run resumes the conversation, unless you give --no-store. A terminal shows answers as
    Markdown.

    /help lists the commands: /system, /fork, /why, /save, /usage, /reset and /exit; Ctrl-C stops an
    answer. A line that ends with a backslash continues in the next one. From a pipe each line is
    one turn, and the first one that fails ends the conversation.
    """
    params = sampling.params()
    settings = engine.settings(adapter)
    require_chosen_store(settings)
    if system is not None:
        require_text(system)
    with ProgressBar() as progress:
        progress.show(f"loading {settings.label}")
        from semantic.cli.dialogue.chat_session import ChatSession
        from semantic.library.engine import Engine

        loaded = Engine(settings, on_store_unavailable=print_store_unavailable)
    with loaded:
        _require_template(loaded)
        session = ChatSession(loaded, agent, max_tokens, params)
        session.begin(system, new=new)
        if is_interactive():
            write("/help lists the commands.\n")
            _converse(session)
        else:
            for message in joined(stdin_lines()):
                if not session.handle(message):
                    break


def joined(lines: Iterable[str]) -> Iterator[str]:
    """Yield messages: a line that ends with a backslash continues in the next line."""
    rest = iter(lines)
    for line in rest:
        yield _continued(line, lambda: next(rest, ""))


def _continued(line: str, more: Callable[[], str]) -> str:
    while line.endswith("\\"):
        line = f"{line[:-1]}\n{more()}"
    return line


def _require_template(engine: Engine) -> None:
    try:
        engine.count_tokens("Hello")
    except InvalidRequestError as error:
        raise InvalidRequestError(
            "this model has no chat template; `semantic run` sends it plain text"
        ) from error


def _read_message() -> str:
    return _continued(input("> "), lambda: input("... "))


def _converse(session: ChatSession) -> None:
    """Read turns from a terminal until /exit, Ctrl-D, or Ctrl-C twice."""
    import readline  # noqa: F401  gives `input` editing, a history, and pasted lines as one text

    interrupted = False
    while True:
        try:
            message = _read_message()
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
            with on_signals(lambda _: session.cancel(), signal.SIGINT):
                if not session.handle(message):
                    return
        except SemanticError as error:
            print_error(error)
