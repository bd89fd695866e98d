"""Ten answers of an agent's session over each wire: calls, edits, reasoning and what is cached."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

import pytest

from tests.families.sessions import SPEAKERS, STEPS, TOOLS, Speaker, Step
from tests.support.chat_templates import Format
from tests.support.families import OURS, REAL
from tests.support.http_server import RunningServer
from tests.support.lanes import more_rows
from tests.support.scripted_model import write_script
from tests.support.served_store import served
from tests.support.wires import WIRES, Heard, Wire

RESTARTS_BEFORE = 5
FIRST = [
    (family, list(WIRES)[number % len(WIRES)], number % 2 == 0)
    for number, family in enumerate(SPEAKERS)
]
ALL = [(family, wire, how) for family in SPEAKERS for wire in WIRES for how in (False, True)]


def format_of(family: str) -> Format:
    speaks = SPEAKERS[family]
    own = OURS[speaks.own]
    # Here no prompt begins a thought.
    own = replace(own, template=str(own.template).replace("<think>\n{% endif %}", "{% endif %}"))
    return REAL.get(speaks.template, own)


def check(heard: Heard, step: Step, before: Heard | None) -> None:
    assert [(call.name, call.arguments) for call in heard.calls] == list(step.calls)
    assert heard.text == step.text
    assert heard.reasoning.strip() == step.reasoning
    if before is not None and heard.cached is not None:
        assert heard.cached >= 0.95 * (before.prompt + before.written), (heard, before)


def go_on(wire: Wire, heard: Heard, step: Step, number: int) -> None:
    """What an agent sends behind an answer: results in another order, or what its user says."""
    if step.interrupted:
        wire.interrupt(heard.calls, f"Stop that, {number}.")
    elif heard.calls:
        for at, call in reversed(list(enumerate(heard.calls))):
            wire.result(call, f"result {number} of {at}\n", image=number == 1 and at == 0)
    else:
        wire.user(f"Go on, {number}.")


@dataclass
class Session:
    """One conversation on a wire, and what of it can be cached next."""

    wire: Wire
    speaks: Speaker
    begun: Heard | None = None  # the first answer since the user spoke
    before: Heard | None = None

    def talk(self, server: RunningServer, steps: Sequence[Step], first: int) -> None:
        for number, step in enumerate(steps, first):
            heard = self.wire.ask(server)
            check(heard, step, self.before)
            self.begun = self.begun or heard
            self.before = heard
            if not step.calls:
                if self.speaks.forgets:
                    self.before = replace(self.begun, written=0)
                if self.speaks.moves_tools:
                    self.before = None
                self.begun = None
            go_on(self.wire, heard, step, number)


@pytest.mark.process
@pytest.mark.parametrize(
    ("family", "name", "streams"),
    [*FIRST, *more_rows(*(case for case in ALL if case not in FIRST))],
)
def test_a_session_of_ten_answers(family: str, name: str, streams: bool, tmp_path: Path) -> None:
    speaks = SPEAKERS[family]
    steps = [speaks.said(step) for step in STEPS]
    written = format_of(family)
    write_script(tmp_path / "model", written, speaks.answers(written, steps))
    session = Session(WIRES[name](TOOLS, streams=streams), speaks)
    session.wire.user("Mend a.py.")
    with served(tmp_path, tmp_path / "model") as server:
        model = cast(
            "dict[str, object]", server.ask("GET", "/v1/models/default").json["capabilities"]
        )
        assert model["tools"] == "native"
        session.talk(server, steps[:RESTARTS_BEFORE], 0)
    with served(tmp_path, tmp_path / "model") as server:
        session.talk(server, steps[RESTARTS_BEFORE:], RESTARTS_BEFORE)
