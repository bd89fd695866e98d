"""Completes names of agents and models in a shell.

Returns only words without special characters: clients name agents, and a shell may evaluate
completions.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import typer

_MOST = 50
"""The maximum number of completions to return."""
_MOST_ENTRIES = 2000
"""The maximum number of folders in the hub's cache to look at."""
_PLAIN = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.@:/+,-]*")
_HUB_FOLDER = re.compile(r"models--(.+?)--(.+)")


def complete_agents(ctx: typer.Context, incomplete: str) -> list[str]:
    """Return names of the local tenant's agents, last saved first."""
    from semantic.adapters.stores.disk.folder import agent_names
    from semantic.composition.engine_settings import Settings
    from semantic.composition.process_stores import store_folder
    from semantic.domain.errors import StoreError

    try:
        folder = store_folder(Settings(store=_given_store(ctx)))
    except StoreError:  # there is no home folder
        return []
    return [name for name in agent_names(folder, incomplete, _MOST) if _PLAIN.fullmatch(name)]


def complete_models(incomplete: str) -> list[str]:
    """Return names of models. These are aliases and the models in the hub's cache."""
    from semantic.composition.engine_settings import DEFAULT_MODEL

    names = [DEFAULT_MODEL, *_aliases(), *sorted(_cached_models())]
    fitting = (name for name in names if name.startswith(incomplete) and _PLAIN.fullmatch(name))
    return list(islice(fitting, _MOST))


def _given_store(ctx: typer.Context) -> Path | None:
    contexts = [ctx, *([ctx.parent] if ctx.parent else []), ctx.find_root()]
    given = (one.params.get("store") for one in contexts)
    return next((Path(store) for store in given if isinstance(store, str | Path)), None)


def _aliases() -> list[str]:
    from semantic.adapters.hub.aliases import read_aliases
    from semantic.domain.errors import InvalidRequestError

    try:
        return sorted(read_aliases().all())
    except InvalidRequestError:  # their file is unreadable
        return []


def _cached_models() -> Iterator[str]:
    try:
        with os.scandir(_hub_cache()) as entries:
            for entry in islice(entries, _MOST_ENTRIES):
                if found := _HUB_FOLDER.fullmatch(entry.name):
                    yield f"{found[1]}/{found[2]}"
    except OSError:
        return


def _hub_cache() -> Path:
    """Return the hub's cache folder. Importing huggingface_hub for this would be slow."""
    if given := os.environ.get("HF_HUB_CACHE"):
        return Path(given)
    if given := os.environ.get("HF_HOME"):
        return Path(given, "hub")
    caches = os.environ.get("XDG_CACHE_HOME")
    home = Path(caches) if caches else Path(os.environ.get("HOME", ""), ".cache")
    return home / "huggingface" / "hub"
