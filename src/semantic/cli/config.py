"""`semantic config show`: what a server would be set to, and why. Starts nothing."""

from __future__ import annotations

import json
from collections.abc import Callable

from semantic.cli.options import AsJson
from semantic.cli.serve_options import ConfigFile, ServeOptions
from semantic.cli.terminal import write


def show(options: ServeOptions, config: ConfigFile = None, as_json: AsJson = False) -> None:
    """Print every setting of `semantic serve`: its value, and where it is from.

    A flag goes before the environment, that before the file, and that before the default.
    Secrets are masked.
    """
    from semantic.adapters.http.settings import load_settings

    loaded = load_settings(options.given(), config)
    shown = loaded.shown()
    if as_json:
        found = {
            name: {"value": value, "origin": loaded.origins[name]} for name, value in shown.items()
        }
        write(json.dumps(found, indent=2) + "\n")
        return
    wide = max(map(len, shown))
    values = {name: json.dumps(value) for name, value in shown.items()}
    widest = max(map(len, values.values()))
    for name, value in values.items():
        write(f"{name:<{wide}}  {value:<{widest}}  {loaded.origins[name]}\n")


CONFIG_COMMANDS: dict[str, Callable[..., None]] = {"show": show}
