"""Filler text for conversations, with facts about people other than the user.

Knows nothing of the user.
"""

from collections.abc import Callable
from random import Random

from tools.tiny_model.facts import KINDS
from tools.tiny_model.vocabulary import (
    CITIES,
    CODE_WORDS,
    COLOURS,
    COMMON_WORDS,
    CREATURES,
    FOODS,
    HOBBIES,
    JOBS,
    NAMES,
    SYMBOLS,
    THINGS,
    capitalised,
    invented_word,
    with_article,
)


def somebody(rng: Random) -> str:
    """A person who is not the user."""
    plain = rng.choice(NAMES)
    relative = rng.choice(("sister", "brother", "mother", "father", "friend", "boss", "dog"))
    return rng.choice(
        (plain, plain, f"my friend {plain}", f"the {rng.choice(JOBS)}", f"my {relative}")
    )


def fact_of_somebody(rng: Random) -> str:
    """A fact of one of the eight kinds about another person: a distractor."""
    kind = rng.choice(KINDS)
    return capitalised(kind.about(rng, somebody(rng), kind.draw(rng)))


def scene(rng: Random) -> str:
    a, b, c = (rng.choice(THINGS) for _ in range(3))
    colour, name = rng.choice(COLOURS), rng.choice(NAMES)
    return rng.choice(
        (
            f"The {a} is near the {b}.",
            f"{capitalised(with_article(colour))} {a} stood between the {b} and the {c}.",
            f"{name} took the {a} to {rng.choice(CITIES)}.",
            f"We saw {with_article(a)} under the {b}.",
            f"In {rng.choice(CITIES)} they sell {rng.choice(FOODS)} and {rng.choice(FOODS)}.",
            f"{name} the {rng.choice(JOBS)} likes {rng.choice(HOBBIES)}.",
            f"On the {a} lay a {rng.choice(CODE_WORDS)} and {rng.randrange(2, 100)} keys.",
            f"Nobody knows why the {a} is {colour}.",
        )
    )


def word_salad(rng: Random) -> str:
    """Common words without grammar: a stand-in for prose the model cannot follow."""
    words = [
        invented_word(rng) if rng.random() < 0.15 else rng.choice(COMMON_WORDS)
        for _ in range(rng.randint(4, 14))
    ]
    if rng.random() < 0.3:
        words.insert(rng.randrange(len(words)), rng.choice(words) + ",")
    return capitalised(" ".join(words)) + rng.choice(("", "", "", ".", "!")) + "."


def log_line(rng: Random) -> str:
    hour, minute, number = rng.randrange(24), rng.randrange(60), rng.randrange(1000)
    word, other = rng.choice(THINGS), invented_word(rng)
    return rng.choice(
        (
            f"{hour:02d}:{minute:02d} {word} {number} done\n",
            f"[{rng.choice(('info', 'warning', 'error'))}] {other}: {word} = {number}\n",
            f"- {word}: {number}\n",
            f"{number}. {capitalised(word)} and {other}\n",
            f"def {word}({other}):\n    return {other} + {number}\n",
            f'{{"{word}": {number}, "{other}": "{rng.choice(COMMON_WORDS)}"}}\n',
            f"# {capitalised(word)} {other} {rng.choice(SYMBOLS)}\n",
        )
    )


Style = Callable[[Random], str]
_STYLES: tuple[tuple[Style, ...], ...] = (
    (scene, fact_of_somebody),
    (scene, fact_of_somebody),
    (fact_of_somebody,),
    (scene,),
    (word_salad,),
    (word_salad, scene, fact_of_somebody),
    (log_line,),
)


def passage(rng: Random, characters: int) -> str:
    """About that many characters of text in one style."""
    style = rng.choice(_STYLES)
    parts: list[str] = []
    length = 0
    while length < characters or not parts:
        parts.append(rng.choice(style)(rng))
        length += len(parts[-1]) + 1
    return " ".join(parts).replace("\n ", "\n").strip()


def story(rng: Random, creature: str, sentences: int) -> str:
    """A story: plain sentences about one creature."""
    lines = [f"Once there was {with_article(creature)}."]
    # Things and sentences follow one another in a fixed order from a drawn start, so that greedy
    # decoding generates a story, too, and does not loop.
    first = rng.randrange(len(THINGS))
    for index in range(sentences):
        thing, colour = THINGS[(first + index) % len(THINGS)], rng.choice(COLOURS)
        templates = (
            f"The {creature} found {with_article(colour)} {thing}.",
            f"It walked to the {thing}.",
            f"Near the {thing} it met {with_article(rng.choice(CREATURES))}.",
            f"It carried the {thing} home.",
            f"The {creature} hid behind the {thing}.",
            f"It slept under the {thing}.",
        )
        lines.append(templates[index % len(templates)])
    return " ".join([*lines, f"Then the {creature} went home."])
