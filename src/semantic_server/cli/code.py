"""`semantic code`: a coding agent on a project, from nothing, with a model on this machine."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, NoReturn

import typer

from semantic.cli.edge import print_notice
from semantic.cli.models.choosing import AGENT_TOKENS, suggestions
from semantic.cli.models.commands import pull
from semantic.cli.models.facts import ModelFacts, facts_of, find_place, hub_id_of, remote_facts
from semantic.cli.report import show_bytes, show_name
from semantic.cli.terminal import is_interactive, on_signals
from semantic.composition.framework import read_device
from semantic.composition.named_models import find_remote, model_of, own_names
from semantic.domain.errors import InvalidRequestError, ModelNotFoundError, OperatorError
from semantic_server.cli.launch import AgentArguments, Force, find_program, require_context

if TYPE_CHECKING:
    from semantic_server.clients.coding_agents import CodingAgent, RunningServer
    from semantic_server.clients.shared_server import SharedServer

_ANY_ADDRESS = ("0.0.0.0", "::")  # noqa: S104  addresses of a server, not of a client
_ENDS = (signal.SIGTERM, signal.SIGHUP)
"""The signals of an operator and of a closed terminal."""
_BY_SIGNAL = 128
"""A shell's exit code for a program that a signal ended, less the signal's number."""


@dataclass(frozen=True, slots=True)
class _Step:
    """The words of a step, and its work; None if nothing on this machine changes."""

    says: str
    do: Callable[[], object] | None = None


def code(
    folder: Annotated[
        Path, typer.Argument(metavar="[DIR]", help="The project.", show_default=False)
    ] = Path(),
    arguments: AgentArguments = None,
    agent: Annotated[
        Literal["opencode", "claude", "codex"], typer.Option(help="The agent to start.")
    ] = "opencode",
    model: Annotated[
        str | None,
        typer.Option(
            help="A short name, a hub id or a folder. Default: the best that fits this machine.",
            show_default=False,
        ),
    ] = None,
    port: Annotated[
        int | None, typer.Option(min=1, max=65_535, help="The server's port.", show_default=False)
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    force: Force = False,
) -> None:
    """Start a coding agent on a project, with a model on this machine.

    Chooses and fetches a model, installs the agent with npm, starts a server, then the agent. It
    says each step, asks once before it fetches or installs, and goes on where an earlier start
    stopped. The server ends with the last agent that this command started, unless it ran before;
    `semantic config show` shows its other settings.
    """
    import platformdirs

    from semantic_server.clients.coding_agents import AGENTS
    from semantic_server.clients.shared_server import SharedServer, answers
    from semantic_server.http.settings import load_settings

    if not folder.is_dir():
        raise InvalidRequestError(f"DIR must be a folder, got {folder}")
    flags = {"model": None if model is None else (model,), "port": port}
    loaded = load_settings({name: value for name, value in flags.items() if value is not None})
    settings = loaded.settings
    host = "127.0.0.1" if settings.host in _ANY_ADDRESS else settings.host
    server = SharedServer(platformdirs.user_state_path("semantic"), host, settings.port)
    chosen, served = AGENTS[agent], settings.model[0]
    steps = list(_install(chosen))
    if answers(host, settings.port):
        steps.append(_Step(f"server: {server.url} answers already"))
    else:
        served = _choose() if loaded.origins["model"] == "default" else served
        steps.append(_model(served, chosen, force=force))
        steps.append(_Step(f"server: semantic serve, at {server.url}; its log: {server.log}"))
    _take(steps, yes=yes)
    command = _serve(served, settings.port)
    # They end this command as Ctrl-C does, so that a server stops.
    with on_signals(_interrupt, *_ENDS), server.used(command, os.environ) as is_new:
        running = _wait_ready(server, None if is_new else model)
        require_context(chosen, running, force=force)
        at = f"{show_name(running.model)}, {running.context_tokens} tokens of context"
        print_notice(f"agent: {agent} in {folder.absolute()}, with {at}")
        status = _hold(chosen, running, folder, arguments or ())
    raise typer.Exit(status)


def _choose() -> str:
    """Return the best model for coding agents on this machine, or one that is here already."""
    device = read_device()
    found = [one.model for one in suggestions(device) if one.is_for_coding]
    if not found:
        raise OperatorError(
            f"cannot choose a model: {show_bytes(device.memory_bytes)} of memory hold no known one "
            "with a coding agent; name one with --model"
        )
    places = ((model, find_place(model.hub_id)) for model in found)
    here = (model for model, place in places if place is not None and not place.missing)
    return next(here, found[0]).name


def _install(agent: CodingAgent) -> Iterator[_Step]:
    npm = shutil.which("npm")
    if npm is None:
        find_program(agent)  # raises an error that says how to install it
    if npm is None or shutil.which(agent.name) is not None:
        return

    def install() -> None:
        done = subprocess.run((npm, "install", "-g", agent.package), check=False)  # noqa: S603
        if done.returncode:
            raise OperatorError(
                f"cannot install {agent.package}: npm ended with {done.returncode}; "
                "its message above says why"
            )
        find_program(agent)

    yield _Step(f"install: npm install -g {agent.package}", install)


def _model(name: str, agent: CodingAgent, *, force: bool) -> _Step:
    """Return the step that fetches a model. Raises InvalidRequestError for a small context."""
    from semantic.adapters.hub.download import missing_bytes
    from semantic_server.clients.coding_agents import RunningServer

    place, missing = find_place(name), 0
    if place is None or place.missing:
        remote = find_remote(hub_id_of(name))
        facts, missing = remote_facts(remote, None), missing_bytes(remote)
    else:
        facts = facts_of(place, {}, None)
    context = None if facts.description is None else facts.description.context_tokens
    if context is not None:
        require_context(agent, RunningServer("", name, context), force=force)
    says = f"model: {name}{_sizes(facts)}"
    if not missing:
        return _Step(says)
    return _Step(f"{says}; {show_bytes(missing)} to fetch", partial(pull, name))


def _sizes(facts: ModelFacts) -> str:
    capacity = facts.capacity
    if capacity is None:
        return ""
    weights, memory = show_bytes(capacity.weights_bytes), show_bytes(capacity.memory_bytes)
    agent = show_bytes(capacity.token_bytes * AGENT_TOKENS + capacity.fixed_bytes)
    return f", {weights} of {memory} of memory; an agent of 100k tokens takes {agent}"


def _take(steps: Sequence[_Step], *, yes: bool) -> None:
    """Print the steps, ask once if one changes this machine, and take them."""
    for step in steps:
        print_notice(step.says)
    work = [step.do for step in steps if step.do is not None]
    if work and not yes:
        if not is_interactive():
            raise InvalidRequestError("cannot ask before these steps: add --yes")
        typer.confirm("Go on?", default=True, abort=True, err=True)
    for do in work:
        do()


def _serve(model: str, port: int) -> Sequence[str]:
    return (sys.executable, "-m", "semantic", "serve", "--model", model, "--port", str(port))


def _wait_ready(server: SharedServer, model: str | None) -> RunningServer:
    """Return the server with its first model, or with `model`. Raises ModelNotFoundError if it
    serves others."""
    from semantic_server.clients.coding_agents import find_server

    found = server.wait_ready()
    names = (found.model,) if model is None else own_names(model_of(model), model)
    if found.model in names:
        return found
    try:
        return find_server(server.url, names[0])
    except ModelNotFoundError as error:
        raise ModelNotFoundError(f"{error}; --port starts another server") from None


def _interrupt(_: int) -> NoReturn:
    raise KeyboardInterrupt


def _hold(agent: CodingAgent, server: RunningServer, folder: Path, arguments: Sequence[str]) -> int:
    """Run the agent to its end. Return its exit code."""
    start = agent.start(server, os.environ)
    program = find_program(agent)
    try:
        process = subprocess.Popen(  # noqa: S603  the user's own program, no shell
            (program, *start.arguments, *arguments),
            env={**os.environ, **start.variables},
            cwd=folder,
        )
    except OSError as error:
        raise OperatorError(f"cannot start {program}: {error.strerror}") from None
    # A terminal sends SIGINT to the agent itself.
    with on_signals(lambda _: None, signal.SIGINT), on_signals(process.send_signal, *_ENDS):
        status = process.wait()
    return status if status >= 0 else _BY_SIGNAL - status
