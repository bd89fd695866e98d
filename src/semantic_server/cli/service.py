"""`semantic service`: installs `semantic serve` as a service of the user."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, get_args, get_type_hints

import typer

from semantic.cli.options import AsJson, ConfigFile
from semantic.cli.report import to_line
from semantic.domain.errors import InvalidRequestError, OperatorError
from semantic_server.cli.serve import ServeOptions

if TYPE_CHECKING:
    from semantic_server.http.settings import LoadedSettings
    from semantic_server.service_managers import HostPort, ServicePort, ServiceState

_TO_SAVE_SECONDS = 120
"""The seconds in which the server can save its agents after the last answer."""
_NOT_RUNNING = 1


def install(options: ServeOptions, config: ConfigFile = None) -> None:
    """Start `semantic serve` now and with every login, with these flags.

    Writes a systemd unit or a launchd property list, and prints it. Run it again with other flags
    to change the service and restart the server. Keys must come from a file: --api-key-file.
    """
    from semantic_server.cli.serve import require_keys
    from semantic_server.http.settings import load_settings
    from semantic_server.service_managers import Service

    manager = service_manager()
    loaded = load_settings(options.given(), config)
    require_known_to_the_service(loaded)
    require_keys(loaded.settings)
    command = (sys.executable, "-m", "semantic", "serve", *flags(options, config))
    service = Service(command, loaded.settings.stop_timeout + _TO_SAVE_SECONDS)
    changed = manager.install(service)
    state = manager.state()
    typer.echo(f"{'wrote' if changed else 'unchanged:'} {state.file}\n")
    typer.echo(manager.text(service))
    typer.echo("\n".join(_lines(state)))


def uninstall() -> None:
    """Stop the service and remove its file. Agents and settings stay."""
    manager = service_manager()
    removed = manager.uninstall()
    typer.echo(f"{'removed' if removed else 'there is no'} {manager.state().file}")


def status(as_json: AsJson = False) -> None:
    """Print whether the service exists and runs; exit with status 1 unless it runs."""
    state = service_manager().state()
    if as_json:
        document = {
            "installed": state.installed,
            "running": state.running,
            "file": str(state.file),
            "log": state.log,
        }
        typer.echo(to_line(document))
    else:
        typer.echo("\n".join(_lines(state)))
    if not state.running:
        raise typer.Exit(_NOT_RUNNING)


SERVICE_COMMANDS: dict[str, Callable[..., None]] = {
    "install": install,
    "uninstall": uninstall,
    "status": status,
}


def service_manager(host: HostPort | None = None) -> ServicePort:
    """Return the user's service manager. Raises OperatorError if none is running."""
    from semantic_server.service_managers import Host, Launchd, Systemd

    here = host or Host()
    if here.system == "linux" and Systemd.is_here(here):
        return Systemd(here)
    if here.system == "darwin" and Launchd.is_here(here):
        return Launchd(here)
    raise OperatorError(
        "neither systemd nor launchd runs for this user: log in to a session that has one of "
        "them, or start `semantic serve` by other means"
    )


def require_known_to_the_service(loaded: LoadedSettings) -> None:
    """Raise InvalidRequestError for a setting that the service would not get. A key on the command
    line and a variable of this shell are such settings."""
    from semantic_server.http.settings import KEY_FILES

    for name, origin in loaded.origins.items():
        flag = f"--{KEY_FILES.get(name, name).replace('_', '-')}"
        if name in KEY_FILES and (origin.startswith("flag")):
            raise InvalidRequestError(f"the service's file would show the key: pass {flag} FILE")
        if origin.startswith("env "):
            variable = origin.split()[1]
            raise InvalidRequestError(
                f"the service does not see this shell's {variable}: pass {flag} or add a line to "
                f"{loaded.file}, and unset the variable"
            )


def flags(options: ServeOptions, config: Path | None) -> Iterator[str]:
    """Yield `options` and the file `config` as flags of `semantic serve`. Makes paths absolute."""
    hints = get_type_hints(ServeOptions, include_extras=True)
    given = options.given()
    for field in fields(options):
        value = given.get(field.name)
        if value is None:
            continue
        flag = _flag(field.name, hints[field.name])
        if value is True:
            yield flag
            continue
        for one in value if isinstance(value, list) else [value]:
            yield f"{flag}={_absolute(field.name, one)}"
    if config is not None:
        yield f"--config={config.absolute()}"


def _flag(name: str, hint: object) -> str:
    (option,) = get_args(hint)[1:]
    declared = option.default
    return declared if isinstance(declared, str) else f"--{name.replace('_', '-')}"


_MODELS = frozenset({"model", "allowed_models", "embedding_model", "kept_models"})


def _absolute(name: str, value: object) -> object:
    """Make a path in a setting's value absolute, because the service runs in another folder."""
    if isinstance(value, Path):
        return value.expanduser().absolute()
    if name == "adapters":
        named, mark, path = str(value).rpartition("=")
        return f"{named}{mark}{Path(path).expanduser().absolute()}"
    if name in _MODELS and isinstance(value, str) and Path(value).is_dir():
        return Path(value).absolute()
    return value


def _lines(state: ServiceState) -> Iterator[str]:
    yield f"installed  {'yes' if state.installed else 'no'}  {state.file}"
    yield f"running    {'yes' if state.running else 'no'}"
    if state.installed:
        yield f"starts     with {state.starts_with}"
        yield f"log        {state.log}"
