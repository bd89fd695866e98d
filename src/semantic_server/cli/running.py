"""Commands for the models, memory and agents of a running server, and its tools over MCP."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, BinaryIO

import typer

from semantic import __version__
from semantic.cli.agent_lookup import (
    AgentName,
    ModelId,
    TenantName,
    find_agent,
    open_store,
    shown_id,
)
from semantic.cli.edge import print_notice
from semantic.cli.options import (
    DEFAULT_KEY_VARIABLE,
    DEFAULT_SERVER,
    AsJson,
    Command,
    KeyVariable,
    ServerUrl,
    StoreOptions,
    gib,
)
from semantic.cli.progress import download_bar, work_bar
from semantic.cli.report import (
    Json,
    columns,
    print_result,
    show_bytes,
    show_name,
    show_seconds,
    to_line,
)
from semantic.composition.named_models import model_name
from semantic.domain.block_hash import LOCAL_TENANT
from semantic.domain.errors import InvalidRequestError, OperatorError

if TYPE_CHECKING:
    from semantic_server.clients.server_connection import Owner


_HEADINGS = ("model", "state", "memory", "running", "waiting", "unloaded")
_Served = Annotated[
    str, typer.Argument(metavar="MODEL", help="A model name of the server.", show_default=False)
]


def ps(
    url: ServerUrl = DEFAULT_SERVER,
    key_variable: KeyVariable = DEFAULT_KEY_VARIABLE,
    as_json: AsJson = False,
) -> None:
    """List the models of a running server: their state, memory and work."""
    from semantic_server.clients.server_connection import list_models

    rows = list_models(url, key_variable)
    if as_json:
        typer.echo(to_line({"models": [dict(row) for row in rows]}))
        return
    typer.echo("\n".join(columns([_HEADINGS, *map(_row, rows)])))


def load(
    model: _Served,
    url: ServerUrl = DEFAULT_SERVER,
    key_variable: KeyVariable = DEFAULT_KEY_VARIABLE,
    as_json: AsJson = False,
) -> None:
    """Load one of the models of a running server, and wait until it is loaded."""
    from semantic_server.clients.server_connection import change_model

    _print(change_model(url, key_variable, model, "load"), as_json=as_json)


def unload(
    model: _Served,
    url: ServerUrl = DEFAULT_SERVER,
    key_variable: KeyVariable = DEFAULT_KEY_VARIABLE,
    as_json: AsJson = False,
) -> None:
    """Unload one of the models of a running server once its requests have finished."""
    from semantic_server.clients.server_connection import change_model

    _print(change_model(url, key_variable, model, "unload"), as_json=as_json)


RUNNING_MODEL_COMMANDS: dict[str, Callable[..., None]] = {"ps": ps, "load": load, "unload": unload}


def unloaded_when(pinned: bool, expires_in: float | None) -> str:
    """Return a phrase that says when an idle model unloads."""
    if expires_in is not None:
        return f"in {show_seconds(expires_in)}"
    return "never" if pinned else "when needed"


def _print(found: Mapping[str, object], *, as_json: bool) -> None:
    name, state = str(found["id"]), str(found["state"])
    typer.echo(to_line(dict(found)) if as_json else f"{show_name(name)} is {state}")


def _row(row: Mapping[str, object]) -> tuple[str, ...]:
    memory, expires = row.get("memory_bytes"), row.get("expires_in")
    return (
        show_name(str(row["id"])),
        str(row.get("state", "loaded")),
        show_bytes(memory) if isinstance(memory, int) else "",
        str(row.get("running", "")),
        str(row.get("waiting", "")),
        unloaded_when(
            row.get("pinned") is not False, expires if isinstance(expires, int | float) else None
        ),
    )


@dataclass(frozen=True, slots=True)
class MemoryOptions:
    url: ServerUrl = DEFAULT_SERVER
    key_variable: KeyVariable = DEFAULT_KEY_VARIABLE
    limit: Annotated[
        float | None,
        typer.Option(help="New limit on the process's memory, in GiB.", show_default=False),
    ] = None
    reset: Annotated[
        bool, typer.Option("--reset", help="Restore the limit that the server started with.")
    ] = False


def memory(options: MemoryOptions, as_json: AsJson = False) -> None:
    """Show how much memory a running server uses and may use; with --limit, change the limit.

    A lower limit frees the excess in the order that `semantic serve --memory-gb` describes; running
    answers continue.
    """
    from semantic_server.clients.server_connection import limit_memory, read_memory

    if options.reset and options.limit is not None:
        raise InvalidRequestError("expected either --limit or --reset")
    gib("--limit", options.limit)
    if options.reset or options.limit is not None:
        found = limit_memory(options.url, options.key_variable, options.limit)
    else:
        found = read_memory(options.url, options.key_variable)
    typer.echo(to_line(dict(found)) if as_json else "\n".join(_lines(found)))


def _lines(found: Mapping[str, object]) -> list[str]:
    used, now, most = (
        show_bytes(int(str(found[name]))) for name in ("used_bytes", "limit_bytes", "max_bytes")
    )
    lines = [f"{used} of {most}"]
    lines += [f"{now} while the system is short of memory"] if now != most else []
    steps = found.get("steps")
    if isinstance(steps, list) and steps:
        lines.append(f"pressure: {', '.join(map(str, steps))}")
    return lines


_STDOUT = Path("-")
_PIECE_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class RemoteOptions:
    """Options that name a running server."""

    server: Annotated[
        str | None,
        typer.Option(
            "--server",
            "--url",
            help="The address of a running server that has the agent; FILE is then one tar file. "
            "Default: the store.",
            show_default=False,
        ),
    ] = None
    model: Annotated[
        str | None,
        typer.Option(
            help="With --server: the agent's model; required if the server has several models.",
            show_default=False,
        ),
    ] = None
    key_variable: KeyVariable = DEFAULT_KEY_VARIABLE

    def address(self, store: StoreOptions, model_id: str | None = None) -> str | None:
        """Return the server's address, or None if the user named no server. Raises
        InvalidRequestError if options contradict each other."""
        if self.server is None and self.model is not None:
            raise InvalidRequestError("--model requires --server")
        if self.server is not None and (store != StoreOptions() or model_id is not None):
            raise InvalidRequestError(
                "expected either --server, or --store, --disk-gb and --model-id"
            )
        return self.server

    def owner(self, tenant: str | None) -> Owner:
        from semantic_server.clients.server_connection import Owner

        return Owner(self.model, tenant)


def export_archive(
    url: str, key_variable: str, name: str, owner: Owner, file: Path
) -> tuple[str, Json]:
    """Write an agent of a server to a new file or stdout. Return a report as text and as JSON."""
    from semantic_server.clients.server_connection import exported

    with (
        _destination(file) as out,
        exported(url, key_variable, name, owner) as archive,
        download_bar(name, archive.n_bytes) as advance,
    ):
        for piece in archive.pieces:
            out.write(piece)
            advance(len(piece))
    text = f"{show_name(name)}: {show_bytes(archive.n_bytes)} in {file}"
    return text, {"name": name, "bytes": archive.n_bytes, "files": [str(file)]}


def import_archive(
    url: str, key_variable: str, file: Path, name: str | None, owner: Owner
) -> tuple[str, Json]:
    """Send an agent's archive to a server. Return a report as text and as JSON."""
    from semantic.adapters.exchange.transfer import open_file
    from semantic_server.clients import server_connection as agent_archives

    with open_file(file) as archive:
        n_bytes = os.fstat(archive.fileno()).st_size
        with download_bar(file.name, n_bytes) as advance:
            pieces = _pieces(archive, n_bytes, advance)
            own, tokens = agent_archives.import_archive(
                url, key_variable, (pieces, n_bytes), name, owner
            )
    text = f"{show_name(own)}: {tokens} tokens, {show_bytes(n_bytes)}"
    return text, {"name": own, "tokens": tokens, "bytes": n_bytes}


def is_stdout(file: Path) -> bool:
    return file == _STDOUT


def export(
    store: StoreOptions,
    remote: RemoteOptions,
    name: AgentName,
    file: Annotated[
        Path,
        typer.Argument(
            help="Where to write: FILE.safetensors and FILE.json, or with --server one FILE; - is "
            "stdout.",
            show_default=False,
        ),
    ],
    model_id: ModelId = None,
    tenant: TenantName = None,
    as_json: AsJson = False,
) -> None:
    """Export an agent with its blocks to two files, for another machine.

    The files contain the agent's whole conversation, readable without a key. With
    --server the export is one tar file, which `import` accepts with --server. An interrupted export
    leaves no file.
    """
    from semantic.adapters.exchange.transfer import export_agent

    url = remote.address(store, model_id)
    if is_stdout(file) and (as_json or url is None):
        raise InvalidRequestError("expected a file: - requires --server and excludes --json")
    if url is not None:
        moved = export_archive(url, remote.key_variable, name, remote.owner(tenant), file)
        if is_stdout(file):
            print_notice(moved[0])
        else:
            print_result(as_json, *moved)
        return
    with open_store(store) as disk:
        agent = find_agent(disk, name, model_id, tenant)
        # The path of the model's folder means nothing elsewhere, and may contain the user's name.
        shown = replace(agent, model=model_name(agent.model))
        with work_bar(f"exporting {name}") as on_progress:
            written = export_agent(disk, shown, file, on_progress)
    stored = written.n_blocks - written.missing_blocks
    text = (
        f"{show_name(name)}: {stored} of {written.n_blocks} blocks, {show_bytes(written.n_bytes)}, "
        f"in {written.files.bodies} and {written.files.document}"
    )
    document: Json = {
        "name": name,
        "blocks": written.n_blocks,
        "stored_blocks": stored,
        "bytes": written.n_bytes,
        "files": [str(written.files.bodies), str(written.files.document)],
    }
    print_result(as_json, text, document)


def import_(
    store: StoreOptions,
    remote: RemoteOptions,
    file: Annotated[
        Path,
        typer.Argument(
            help="One of the two files, or FILE without its suffix; with --server the tar file.",
            show_default=False,
        ),
    ],
    name: Annotated[
        str | None,
        typer.Option("--as", help="Name for the agent. Default: its own.", show_default=False),
    ] = None,
    tenant: Annotated[
        str | None,
        typer.Option(
            metavar="ID",
            help="With --server: the tenant that gets the agent; the server's log lists the ids.",
            show_default=False,
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Import an exported agent, after checking every byte of it.

    Import only trusted files: checksums detect damage, not forged contents. Only requests that name
    the agent can continue from its cache. An interrupted import leaves nothing in the store.
    """
    from semantic.adapters.exchange.transfer import import_agent

    url = remote.address(store)
    if url is not None:
        owner = remote.owner(tenant)
        print_result(as_json, *import_archive(url, remote.key_variable, file, name, owner))
        return
    if tenant is not None:
        raise InvalidRequestError("--tenant requires --server")
    words = f"importing {file.name}"
    with open_store(store, create=True) as disk, work_bar(words) as on_progress:
        read = import_agent(disk, file, tenant=LOCAL_TENANT, name=name, on_progress=on_progress)
    agent = read.manifest
    text = (
        f"{show_name(agent.agent_id)}: {len(agent.token_ids)} tokens, "
        f"{show_bytes(read.n_bytes)} of blocks"
    )
    document: Json = {
        "name": agent.agent_id,
        "model_id": shown_id(agent, whole=True),
        "tokens": len(agent.token_ids),
        "bodies": read.n_bodies,
        "bytes": read.n_bytes,
    }
    print_result(as_json, text, document)


ARCHIVE_COMMANDS: dict[str, Command] = {"export": export, "import": import_}


def mcp(
    url: ServerUrl = DEFAULT_SERVER,
    key_variable: KeyVariable = DEFAULT_KEY_VARIABLE,
    model: Annotated[
        str | None,
        typer.Option(help="The agents' model. Default: the server's first.", show_default=False),
    ] = None,
) -> None:
    """Serve tools over MCP, by which any agent forks and forgets agents of a running server.

    The program that starts it talks to it on stdin and stdout. Needs semantic-engine[mcp].
    """
    try:
        from semantic_server.clients.agent_tools import AgentTools, make_tools
    except ImportError as error:
        raise OperatorError(f"cannot serve tools: {error}; install semantic-engine[mcp]") from error
    make_tools(AgentTools(url, key_variable, model), __version__).run()


@contextmanager
def _destination(file: Path) -> Iterator[BinaryIO]:
    from semantic.adapters.exchange.transfer import create_file

    if not is_stdout(file):
        with create_file(file) as out:
            yield out
        return
    if sys.stdout.isatty():
        raise InvalidRequestError("expected a file: a terminal cannot show an archive")
    yield typer.get_binary_stream("stdout")


def _pieces(file: BinaryIO, n_bytes: int, advance: Callable[[int], None]) -> Iterator[bytes]:
    while n_bytes and (piece := file.read(min(n_bytes, _PIECE_BYTES))):
        n_bytes -= len(piece)
        yield piece
        advance(len(piece))
