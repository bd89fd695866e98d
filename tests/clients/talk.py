"""What is said to the model inside the package, and what it answers. Standard library only."""

from __future__ import annotations

import json
import time
import urllib.request
from collections.abc import Sequence
from typing import Final, Literal

MODEL: Final = "semantic-tiny"

EMBEDDING_MODEL: Final = "tiny-vectors"
"""A model with random weights: its vectors tell texts apart, and mean nothing."""
EMBEDDED: Final = ("Oslo is in Norway.", "Rome is in Italy.")
DIMENSIONS: Final = 32

HELLO: Final = "My name is Ada and I live in Oslo."
HELLO_ANSWER: Final = "Nice to meet you, Ada."
NAME: Final = "What is my name?"
NAME_ANSWER: Final = "Your name is Ada."
CITY: Final = "Where do I live?"
CITY_ANSWER: Final = "You live in Oslo."
WEATHER: Final = "What is the weather in Oslo?"
WEATHER_FOUND: Final = "It is sunny in Oslo."

COUNT: Final = "Count from 8 to 12."
COUNT_STOP: Final = " 10"
COUNT_TO_STOP: Final = "8, 9,"

ENDLESS: Final = "Count from 1 to 99."
"""Its answer takes hundreds of tokens: time enough to leave before the end."""

CITIES: Final = ("Oslo", "Rome")
City = Literal["Oslo", "Rome"]
CITY_SCHEMA: Final = {
    "type": "object",
    "properties": {"city": {"type": "string", "enum": list(CITIES)}},
    "required": ["city"],
    "additionalProperties": False,
}

ROOM_FOR_JSON: Final = 600
"""Tokens; the model is free to write spaces between the marks."""

TOO_LONG: Final = "word " * 9000
"""More tokens than the model's context has."""

_ROUNDING: Final = 1e-4
_IDLE_SECONDS: Final = 10.0


def counting(first: int) -> tuple[str, str]:
    """A question, and the only right answer."""
    numbers = range(first, first + 5)
    return f"Count from {first} to {first + 4}.", ", ".join(map(str, numbers)) + "."


def reading(about: str) -> str:
    """Some five hundred tokens to read, unlike what is read about something else."""
    return "Read this: " + " ".join(f"The {about} has page {i}." for i in range(1, 60))


def are_vectors(found: Sequence[Sequence[float]]) -> bool:
    """Whether these are vectors of `EMBEDDED`: of its length, of length 1, and apart."""
    lengths = [sum(one * one for one in vector) for vector in found]
    apart = sum(one * two for one, two in zip(*found, strict=True))
    return (
        [len(vector) for vector in found] == [DIMENSIONS] * len(EMBEDDED)
        and all(abs(length - 1) < _ROUNDING for length in lengths)
        and apart < 1 - _ROUNDING
    )


def grows(prompts: Sequence[int], cached: Sequence[int]) -> bool:
    """Whether from turn to turn all that was in the last prompt came from the cache."""
    turns = zip(prompts, cached[1:], strict=False)
    return len(prompts) > 1 and all(0 < before <= held for before, held in turns)


def tokens_when_idle(url: str, agent: str) -> int:
    """How many tokens the agent has when nothing is computed for it any more.

    Raises TimeoutError when that does not come.
    """
    end = time.monotonic() + _IDLE_SECONDS
    while time.monotonic() < end:
        with urllib.request.urlopen(f"{url}/v1/agents/{agent}") as response:
            found = json.load(response)
        if found["state"] == "idle":
            return int(found["tokens"])
        time.sleep(0.02)
    raise TimeoutError(f"{agent} is not idle after {_IDLE_SECONDS} s: {found}")
