"""`semantic cache`: the store on disk as a whole."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Annotated

import typer

from semantic.cli.agent_lookup import open_store
from semantic.cli.edge import EXIT_CHECK_FAILED
from semantic.cli.options import AsJson, DiskRatedTbw, FleetOptions, StoreOptions, terabytes
from semantic.cli.progress import work_bar
from semantic.cli.report import show_bytes, show_name, store_json, store_lines, to_line
from semantic.composition.process_stores import require_shared
from semantic.domain.errors import InvalidRequestError

if TYPE_CHECKING:
    from semantic.adapters.stores.disk.maintenance import CheckReport, CollectReport

_WHOLE = "1/1"


def stats(
    store: StoreOptions,
    fleet: FleetOptions,
    disk_rated_tbw: DiskRatedTbw = None,
    as_json: AsJson = False,
) -> None:
    """Print the number of agents and blocks in the store, their size, and the bytes written.

    With --remote-store, also print the janitor's last report on the fleet's object store.
    """
    rated = terabytes(disk_rated_tbw)
    if rated is not None and rated < 1:
        raise InvalidRequestError(f"--disk-rated-tbw must be above 0, got {disk_rated_tbw}")
    with open_store(store) as disk:
        tiers = [
            replace(one, wear=None if one.wear is None else replace(one.wear, rated=rated))
            for one in disk.stats()
        ]
    is_fleet = fleet.remote_store is not None
    found = require_shared(fleet.settings()).last_pass() if is_fleet else None
    if as_json:
        remote = {"remote": found and found[1]} if is_fleet else {}
        typer.echo(to_line({"tiers": store_json(tiers), **remote}))
        return
    typer.echo("\n".join(store_lines(tiers)))
    if is_fleet:
        typer.echo(f"object store: {found[0] if found else 'no janitor was here'}")


def check(
    store: StoreOptions,
    read_data: Annotated[
        bool, typer.Option("--read-data", help="Read every byte, not only headers.")
    ] = False,
    read_data_subset: Annotated[
        str | None,
        typer.Option(
            metavar="N/M",
            help="Read every byte of the N-th of M equal shares of the files.",
            show_default=False,
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Check every file of the store without changing it; exits with 1 if a file is damaged.

    A damaged file never causes a wrong answer: the engine computes its block again.
    """
    subset = _parse_subset(_WHOLE if read_data_subset is None else read_data_subset)
    with open_store(store) as disk, work_bar("checking files") as on_progress:
        report = disk.check(
            read_data=read_data or read_data_subset is not None,
            subset=subset,
            on_progress=on_progress,
        )
    if as_json:
        typer.echo(to_line({**asdict(report), "passed": report.is_clean}))
    else:
        typer.echo("\n".join(_found(report)))
    if not report.is_clean:
        raise typer.Exit(EXIT_CHECK_FAILED)


def gc(
    store: StoreOptions,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print what it would delete, and delete nothing.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Delete unreferenced blocks, unfinished and damaged files, and blocks beyond --disk-gb."""
    with open_store(store) as disk, work_bar("deleting blocks") as on_progress:
        report = disk.gc(dry_run=dry_run, on_progress=on_progress)
    typer.echo(to_line(asdict(report)) if as_json else "\n".join(_collected(report)))


def rebuild_index(store: StoreOptions, as_json: AsJson = False) -> None:
    """Rebuild the index from the files, which are authoritative."""
    with open_store(store) as disk:
        with work_bar("reading files"):
            disk.rebuild_index()
        tiers = disk.stats()
    if as_json:
        typer.echo(to_line({"tiers": store_json(tiers)}))
        return
    (tier,) = tiers
    typer.echo(f"the index has {tier.n_blocks} blocks and {tier.n_agents} agents")


CACHE_COMMANDS: dict[str, Callable[..., None]] = {
    "stats": stats,
    "check": check,
    "gc": gc,
    "rebuild-index": rebuild_index,
}


def _parse_subset(given: str) -> tuple[int, int]:
    match = re.fullmatch(r"([0-9]{1,9})/([0-9]{1,9})", given, re.ASCII)
    part, parts = (int(match[1]), int(match[2])) if match else (0, 0)
    if not 1 <= part <= parts:
        raise InvalidRequestError(
            f"--read-data-subset must be N/M with N from 1 to M, got {show_name(given)!r}"
        )
    return part, parts


def _found(report: CheckReport) -> Iterator[str]:
    yield (
        f"sound: {report.n_blocks} blocks and {report.n_manifests} manifests, "
        f"{show_bytes(report.n_bytes)}"
    )
    for problem in report.damaged:
        yield f"damaged: {show_name(problem.path, whole=True)}: {problem.damage}"
    for path in report.newer:
        yield f"written by a later version: {show_name(path, whole=True)}"
    for path in report.foreign:
        yield f"not ours: {show_name(path, whole=True)}"


def _collected(report: CollectReport) -> Iterator[str]:
    counts = {
        "blocks of no agent": report.unneeded_blocks,
        "unfinished files": report.unfinished_files,
        "damaged files": report.damaged_files,
        "blocks over the limit": report.evicted_blocks,
    }
    verb = "would delete" if report.dry_run else "deleted"
    for what, count in counts.items():
        if count:
            yield f"{verb} {count} {what}"
    yield f"{show_bytes(report.freed_bytes)} {'would be' if report.dry_run else 'were'} freed"
