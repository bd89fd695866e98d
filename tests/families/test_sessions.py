"""Ten answers of an agent's session over each wire: calls, edits, reasoning and what is cached."""

from __future__ import annotations

from pathlib import Path
from typing import cast

import pytest

from tests.families.held import RESTARTS_BEFORE, Session, write_session
from tests.families.sessions import SPEAKERS, TOOLS
from tests.support.lanes import more_rows
from tests.support.served_store import served
from tests.support.wires import WIRES

FIRST = [
    (family, list(WIRES)[number % len(WIRES)], number % 2 == 0)
    for number, family in enumerate(SPEAKERS)
]
ALL = [(family, wire, how) for family in SPEAKERS for wire in WIRES for how in (False, True)]


@pytest.mark.process
@pytest.mark.parametrize(
    ("family", "name", "streams"),
    [*FIRST, *more_rows(*(case for case in ALL if case not in FIRST))],
)
def test_a_session_of_ten_answers(family: str, name: str, streams: bool, tmp_path: Path) -> None:
    steps = write_session(family, tmp_path / "model")
    session = Session(WIRES[name](TOOLS, streams=streams), SPEAKERS[family])
    with served(tmp_path, tmp_path / "model") as server:
        model = cast(
            "dict[str, object]", server.ask("GET", "/v1/models/default").json["capabilities"]
        )
        assert model["tools"] == "native"
        session.talk(server, steps[:RESTARTS_BEFORE], 0)
    with served(tmp_path, tmp_path / "model") as server:
        session.talk(server, steps[RESTARTS_BEFORE:], RESTARTS_BEFORE)
