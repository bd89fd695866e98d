"""Held-out questions with one right answer, for the trainer's own check and for the evaluation.

Knows conversations and token counts, not how a model is run.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from random import Random

from tools.tiny_model import dialogues, seeds, texts
from tools.tiny_model.dialogues import Message, Scene, render
from tools.tiny_model.facts import KINDS, FactKind

DISTANCES = (200, 1000, 2000, 3500)

Counter = Callable[[str], int]
Values = Mapping[str, Sequence[str]]

# None of these is in a word list of the generator.
UNSEEN: Values = {
    "name": ("Sebastian", "Tomasz", "Guinevere", "Hiroshi", "Beatrix", "Mohammed", "Oleksandra"),
    "city": ("Reykjavik", "Kampala", "Santiago", "Marrakesh", "Wellington", "Ljubljana", "Osaka"),
    "pet": ("iguana", "chinchilla", "cockatoo", "salamander", "axolotl", "budgerigar", "llama"),
    "colour": ("turquoise", "magenta", "khaki", "burgundy", "lavender", "ochre", "cyan"),
    "food": ("lasagne", "moussaka", "bibimbap", "sauerkraut", "tiramisu", "goulash", "paella"),
    "job": ("astronaut", "blacksmith", "mathematician", "umpire", "veterinarian", "optician"),
    "hobby": ("archery", "birdwatching", "calligraphy", "parkour", "embroidery", "curling"),
    "code": ("tango 17", "walrus 80", "PLUM-9931", "cactus 33", "obsidian 64", "zebra 58"),
}


@dataclass(frozen=True, slots=True)
class Question:
    """One question behind a shared prompt. Distance is None where no fact is asked for."""

    topic: str
    text: str
    answer: str
    distance: int | None = None


@dataclass(frozen=True, slots=True)
class Trial:
    """A conversation up to the point at which each of the questions may follow."""

    messages: tuple[Message, ...]
    questions: tuple[Question, ...]


_FILLERS: tuple[tuple[int, dialogues.Act], ...] = (
    (3, dialogues.do_sum),
    (3, dialogues.repeat),
    (2, dialogues.small_talk),
    (2, dialogues.ask_unknown),
    (1, dialogues.tell_story),
)


def recall_trial(seed: str, distance: int, count: Counter, values: Values | None = None) -> Trial:
    """All eight facts in one message, other matter up to the distance, then the questions."""
    rng = Random(seeds.held_out(seed))
    scene = Scene(rng)
    if rng.random() < 0.5:
        scene.add("system", dialogues.introduction(scene))
    kinds = rng.sample(KINDS, len(KINDS))
    sentences = [stated(scene, kind, values) for kind in kinds]
    tail = distance_tokens(count, sentences)
    scene.exchange(" ".join(sentences), dialogues.acknowledgement(scene, [k.key for k in kinds]))
    filled = count(render(scene.messages[-1:])) + 1
    grain = rng.choice((100, 400, 1500, 4000))
    while filled < distance:
        room = int((distance - filled) * 2.6)
        seen = len(scene.messages)
        if rng.random() < 0.25:
            dialogues.act(scene, _FILLERS)
        else:
            dialogues.read(scene, min(int(grain * rng.uniform(0.5, 1.5)), room))
        filled += count(render(scene.messages[seen:]))
    questions = (
        Question(kind.key, kind.question(rng), dialogues.answer(scene, kind.key), filled + behind)
        for kind, behind in zip(kinds, tail, strict=True)
    )
    return Trial(tuple(scene.messages), tuple(questions))


def stated(scene: Scene, kind: FactKind, values: Values | None) -> str:
    """The fact as a sentence, with a trained kind of value or one from the given values."""
    drawn = scene.rng.choice(values[kind.key]) if values else kind.draw(scene.rng)
    scene.facts[kind.key] = drawn
    return kind.statement(scene.rng, drawn)


def distance_tokens(count: Counter, sentences: list[str]) -> list[int]:
    """For each sentence, how many tokens of the same message come after it."""
    whole = count(" ".join(sentences))
    return [whole - count(" ".join(sentences[: index + 1])) for index in range(len(sentences))]


_BEHAVIOURS: Mapping[str, dialogues.Act] = {
    "greeting": dialogues.greet,
    "small talk": dialogues.small_talk,
    "farewell": dialogues.take_leave,
    "agent's name": dialogues.ask_identity,
    "agent's role": dialogues.ask_role,
    "any fact": dialogues.ask,
    "two questions": dialogues.ask_two,
    "fact and question": dialogues.state_and_ask,
    "acknowledgement": dialogues.state_facts,
    "everything known": dialogues.ask_everything,
    "sum": dialogues.do_sum,
    "repeat": dialogues.repeat,
    "count": dialogues.count,
    "unknown request": dialogues.ask_unknown,
    "reading": dialogues.read,
}
BEHAVIOURS = (*_BEHAVIOURS, "correction", "refusal", "named agent")


def behaviour_trial(topic: str, seed: str) -> Trial:
    """A short lively conversation whose last exchange is of the given topic."""
    rng = Random(seeds.held_out(f"{topic}/{seed}"))
    scene = Scene(rng)
    if rng.random() < 0.5:
        dialogues.open_with_system(scene, 800)
    dialogues.lively(scene, rng.choice((0, 200, 800)))
    if topic == "correction":
        corrected(scene)
    elif topic == "refusal":
        scene = Scene(rng)
        refused(scene)
    elif topic == "named agent":
        scene = shared_team(rng)
    else:
        _BEHAVIOURS[topic](scene)
    (_, question), (_, reply) = scene.messages[-2:]
    return Trial(tuple(scene.messages[:-2]), (Question(topic, question, reply),))


def corrected(scene: Scene) -> None:
    """A fact stated, read past, corrected, read past, and asked for."""
    before = dict(scene.facts)
    dialogues.state_facts(scene)
    dialogues.read(scene)
    known = dict(scene.facts)
    dialogues.correct(scene)
    changed = [key for key, value in scene.facts.items() if known.get(key) != value]
    dialogues.read(scene)
    dialogues.ask(scene, (changed or sorted(before) or sorted(known))[0])


def refused(scene: Scene) -> None:
    """A question for a fact that only other people in a text have."""
    kind, *others = scene.rng.sample(KINDS, 4)
    dialogues.state_facts(scene, [other.key for other in others])
    dialogues.read(scene, 400)
    dialogues.ask(scene, kind.key)


def shared_team(rng: Random) -> Scene:
    """One text shared by many agents, then the one sentence that names this agent."""
    scene = Scene(rng)
    shared = texts.passage(rng, 1500)
    scene.add("system", f"{shared} {dialogues.introduction(scene)}")
    dialogues.ask_identity(scene)
    return scene
