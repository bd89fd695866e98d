"""Checks every agent, or those that are named: `python -m tests.agents [name ...]`.

Each also has a session of ten turns with a model of each of four families, whose figures are kept.
Fetches what is missing, then goes on without a network where the system allows that. Ends with a
table, and with 1 when any check failed; an agent that cannot be had here is skipped, with a word.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, TypedDict

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from tests.agents.agents import AGENTS, STRANGERS, Agent, Report, ReportError, Stranger, named
from tests.agents.conversation import CheckFailedError, Place, hold, meet
from tests.agents.network import NOWHERE, raise_loopback, without_network
from tests.agents.packages import program_of
from tests.agents.session import FAMILIES, hold_session
from tests.support.npm import NotFetchedError
from tests.support.serve_process import ServerFailedError

RESULT: Final = Path(__file__).parents[2] / "benchmarks" / "results" / "agent_sessions.json"


class Row(TypedDict, total=False):
    """A session; `share` of its prompts were cached, and `least` of one of them."""

    agent: str
    version: str
    family: str
    failure: str
    requests: int
    prompt: int
    share: float
    least: float


_SESSIONS: Final = "--sessions"
_INSIDE: Final = "--inside"
"""Given to the process that has no network."""


@dataclass(slots=True)
class Result:
    """How an agent's conversation went, and what went wrong."""

    agent: str
    reports: list[Report] = field(default_factory=list)
    failure: str = ""
    seconds: float = 0.0


def main(arguments: Sequence[str]) -> int:
    """Run the checks; 0 when none failed."""
    names = ", ".join(agent.name for agent in (*AGENTS, *STRANGERS))
    parser = argparse.ArgumentParser(
        prog="tests.agents", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("agents", nargs="*", metavar="name", help=f"some of {names}")
    parser.add_argument(_SESSIONS, action="store_true", help="hold the sessions alone")
    parser.add_argument(_INSIDE, action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    try:
        agents = named(given.agents)
    except KeyError as error:
        parser.error(f"unknown: {error}; expected some of {names}")
    console = Console()
    if given.inside:
        raise_loopback()
        return _check(agents, console, {}, given.sessions)
    there = [agent for agent in agents if _is_there(agent, console)]
    if not there:
        return 0
    prefix = without_network()
    if not prefix:
        console.print("this system gives no process a network of its own: proxies lead nowhere")
        return _check(there, console, NOWHERE, given.sessions)
    names_there = [agent.name for agent in there]
    flags = (_INSIDE, _SESSIONS) if given.sessions else (_INSIDE,)
    command = (*prefix, sys.executable, "-m", "tests.agents", *flags, *names_there)
    return subprocess.run(command, check=False).returncode


def _is_there(agent: Agent | Stranger, console: Console) -> bool:
    """Whether it can be checked here; it is fetched if need be."""
    console.print(f"{agent.package}@{agent.version}")
    try:
        program_of(agent)
    except NotFetchedError as error:
        console.print(f"  {agent.name} is skipped: {error}", markup=False)
        return False
    return True


def _check(
    agents: Sequence[Agent | Stranger], console: Console, extra: dict[str, str], only: bool
) -> int:
    """Check them, `only` in sessions if so."""
    with tempfile.TemporaryDirectory(prefix="semantic-agents-") as folder:
        alone = [] if only else agents
        results = [_checked(agent, Path(folder), console, extra) for agent in alone]
        rows = [
            _session(agent, family, Path(folder), console, extra)
            for agent in agents
            for family in FAMILIES
        ]
    _keep(rows)
    console.print(_table(results))
    return int(any(result.failure for result in results) or any(row["failure"] for row in rows))


def _keep(rows: Sequence[Row]) -> None:
    """Write these rows in place of earlier ones of the same agents and families."""
    known = json.loads(RESULT.read_text(encoding="utf-8")) if RESULT.exists() else []
    found = {(row["agent"], row["family"]): row for row in (*known, *rows)}
    RESULT.write_text(json.dumps(list(found.values()), indent=1) + "\n", encoding="utf-8")


def _session(
    agent: Agent | Stranger, family: str, folder: Path, console: Console, extra: dict[str, str]
) -> Row:
    """A session of ten turns with a model of this family."""
    row = Row(agent=agent.name, version=agent.version, family=family, failure="")
    try:
        place = Place(folder / f"{agent.name}-{family}", program_of(agent), extra)
        found = hold_session(agent, place, family)
        row |= {"requests": found.requests, "share": round(found.share, 4)}
        row |= {"least": round(found.least, 4), "prompt": found.prompt}
    except (CheckFailedError, ReportError, ServerFailedError) as error:
        row["failure"] = f"{type(error).__name__}: {error}"[:300]
    console.print(json.dumps(row), markup=False)
    return row


def _checked(
    agent: Agent | Stranger, folder: Path, console: Console, extra: dict[str, str]
) -> Result:
    console.print(f"[bold]{agent.name}[/bold]")
    result = Result(agent.name)
    began = time.monotonic()
    try:
        place = Place(folder / agent.name, program_of(agent), extra)
        if isinstance(agent, Stranger):
            meet(agent, place)
            reports: Iterator[Report] = iter(())
        else:
            reports = hold(agent, place)
        for report in reports:
            result.reports.append(report)
            console.print(f"  {_told(report)}")
    except (CheckFailedError, ReportError, ServerFailedError) as error:
        result.failure = f"{type(error).__name__}: {error}"
        console.print(result.failure, markup=False)
    result.seconds = time.monotonic() - began
    return result


def _told(report: Report) -> str:
    return f"{report.cached_tokens} of {report.prompt_tokens} ({report.cached_share:.1%})"


def _table(results: Sequence[Result]) -> Table:
    table = Table("agent", "", "cached, by its own report", "seconds", "why")
    for result in results:
        table.add_row(
            result.agent,
            "FAILED" if result.failure else "ok",
            "\n".join(map(_told, result.reports)),
            f"{result.seconds:.0f}",
            escape(result.failure[:200]),
        )
    return table


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
