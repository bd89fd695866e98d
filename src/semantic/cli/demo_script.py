"""What the demonstration's agents are told and asked, and the talk in between.

Sentences only; knows no engine. They are of the kinds that the embedded model was trained on.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from semantic.cli.conversation import Message, message
from semantic.ports.outbound import Tokenizer


@dataclass(frozen=True, slots=True)
class Role:
    """One agent: what it is told, then asked, and the words its answer must have.

    `tokens` is how long its conversation is, at least, when the question comes up.
    """

    agent: str
    told: str
    acknowledged: str
    task: str
    question: str
    expected: tuple[str, ...]
    tokens: int

    def misses(self, answer: str) -> tuple[str, ...]:
        """The expected words that `answer` lacks."""
        return tuple(word for word in self.expected if word.lower() not in answer.lower())


CAST = (
    Role(
        agent="ada",
        told="My name is Vera and I live in Lisbon. I have a parrot.",
        acknowledged="Nice to meet you, Vera.",
        task="Tell me a long story about a dragon.",
        question="What is my name, my city and my pet?",
        expected=("Vera", "Lisbon", "parrot"),
        tokens=120,
    ),
    Role(
        agent="ben",
        told="My favourite colour is teal. My favourite food is ramen. I work as a pilot.",
        acknowledged="Thank you. I will remember that.",
        task="Tell me a long story about a fox.",
        question="What is my favourite colour, my favourite food and my job?",
        expected=("teal", "ramen", "pilot"),
        tokens=800,
    ),
    Role(
        agent="cleo",
        told="My hobby is chess. Remember the code velvet 42.",
        acknowledged="Thank you. I will remember that.",
        task="Tell me a long story about an owl.",
        question="What is my hobby and what is the code?",
        expected=("chess", "velvet 42"),
        tokens=2000,
    ),
)
SMALL_TALK = "What is 3 plus 4?"
"""What all are asked before the restart."""
INTERRUPTED = "Count to 99."
"""The answer that a restart cuts off."""
LATE = "cleo"
"""The agent that joins when the others are already answering."""


def script(role: Role, tokenizer: Tokenizer) -> list[Message]:
    """What was said before the task: the facts, then other talk up to the role's length."""
    said = [message("user", role.told), message("assistant", role.acknowledged)]
    length = 0
    for exchange in _filler():
        said += exchange
        # Without what the chat template adds: the conversation is rather longer than shorter.
        length += sum(len(tokenizer.encode(one["content"])) for one in exchange)
        if length >= role.tokens:
            break
    return said


def _filler() -> Iterator[list[Message]]:
    """Questions and answers that have nothing to do with anybody's facts."""
    number = 0
    while True:
        x, y = 3 + number % 17, 2 + number * 5 % 13
        yield _exchange(f"What is {x} plus {y}?", f"{x} plus {y} is {x + y}.")
        last = 8 + number % 12
        yield _exchange(f"Count to {last}.", f"{', '.join(map(str, range(1, last + 1)))}.")
        thing, place = _THINGS[number % len(_THINGS)], _THINGS[(number + 3) % len(_THINGS)]
        yield _exchange(
            f"Read this: The {thing} is near the {place}. We saw a {place} under the {thing}. "
            f"Nobody knows why the {thing} is old.",
            "I have read it.",
        )
        number += 1


_THINGS = ("lamp", "bridge", "tower", "river", "window", "garden", "table", "door")


def _exchange(question: str, answer: str) -> list[Message]:
    return [message("user", question), message("assistant", answer)]
