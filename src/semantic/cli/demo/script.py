"""The demonstration's conversations: facts, filler, tasks and questions.

Text only, of the kinds that the embedded model was trained on. Knows no engine.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from semantic.cli.conversation import Message, message
from semantic.ports.generation import Tokenizer


@dataclass(frozen=True, slots=True)
class Role:
    """One agent: its facts, its question, and the words that the answer must contain.

    `tokens` is the least length of its conversation before the task.
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
"""The question to every agent before the restart."""
INTERRUPTED = "Count to 99."
"""The question whose answer the kill cuts off."""
LATE = "cleo"
"""The agent that joins while the others decode."""


def script(role: Role, tokenizer: Tokenizer) -> list[Message]:
    """The messages before the task: the facts, then filler up to the role's length."""
    messages = [message("user", role.told), message("assistant", role.acknowledged)]
    length = 0
    for exchange in _filler():
        messages += exchange
        # The chat template's own tokens are not counted: the conversation is longer than this.
        length += sum(len(tokenizer.encode(one["content"])) for one in exchange)
        if length >= role.tokens:
            break
    return messages


def _filler() -> Iterator[list[Message]]:
    """Exchanges unrelated to any role's facts, without end."""
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
