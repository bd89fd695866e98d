"""A session as a client holds it: what it sends, and what each answer must be."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from tests.families.sessions import SPEAKERS, STEPS, Speaker, Step
from tests.support.chat_templates import Format
from tests.support.families import OURS, REAL
from tests.support.http_server import Address
from tests.support.scripted_model import write_script
from tests.support.wires import Heard, Wire

RESTARTS_BEFORE: Final = 5
"""The answer before which the server is started again."""


def write_session(family: str, folder: Path) -> list[Step]:
    """Write the model that gives the session's answers to a new `folder`; what they say."""
    speaks, written = SPEAKERS[family], _format_of(family)
    steps = [speaks.said(step) for step in STEPS]
    write_script(folder, written, speaks.answers(written, steps))
    return steps


def _format_of(family: str) -> Format:
    speaks = SPEAKERS[family]
    own = OURS[speaks.own]
    # Here no prompt begins a thought.
    own = replace(own, template=str(own.template).replace("<think>\n{% endif %}", "{% endif %}"))
    return REAL.get(speaks.template, own)


def _check(heard: Heard, step: Step, before: Heard | None) -> None:
    assert [(call.name, call.arguments) for call in heard.calls] == list(step.calls)
    assert heard.text == step.text
    assert heard.reasoning.strip() == step.reasoning
    if before is not None and heard.cached is not None:
        assert heard.cached >= 0.95 * (before.prompt + before.written), (heard, before)


def _go_on(wire: Wire, heard: Heard, step: Step, number: int) -> None:
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

    def __post_init__(self) -> None:
        self.wire.user("Mend a.py.")

    def talk(self, server: Address, steps: Sequence[Step], first: int) -> None:
        for number, step in enumerate(steps, first):
            heard = self.wire.ask(server)
            _check(heard, step, self.before)
            self.begun = self.begun or heard
            self.before = heard
            if not step.calls:
                if self.speaks.forgets:
                    self.before = replace(self.begun, written=0)
                if self.speaks.moves_tools:
                    self.before = None
                self.begun = None
            _go_on(self.wire, heard, step, number)
