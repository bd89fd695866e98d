"""Conversations between a user and semantic-tiny, drawn from a seeded random generator.

Each answer follows from the conversation before it, except in stories, so greedy decoding has one
right answer. Knows nothing of tokens or of training.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random

from tools.tiny_model import texts
from tools.tiny_model.facts import BY_KEY, KINDS, FactKind, dressed
from tools.tiny_model.vocabulary import (
    CITIES,
    CODE_WORDS,
    COMMON_WORDS,
    CREATURES,
    NAMES,
    ROLES,
    SYMBOLS,
    THINGS,
    capitalised,
    code,
    invented_word,
    words,
)

Message = tuple[str, str]

# More than in the trials: what is hard takes more practice than what is common.
INVENTED = 0.6

UNKNOWN = "I do not know that. I am a very small model."
READ = "I have read it."
SEEN = "I see."
SELF = "I am semantic-tiny, a very small model."
ABILITIES = (
    "I can remember facts about you, do small sums, repeat words, count and tell short stories."
)


def render(messages: list[Message]) -> str:
    """The conversation as the chat template writes it."""
    return "".join(f"<|{role}|>{text}<|end|>" for role, text in messages)


@dataclass(slots=True)
class Scene:
    """One conversation in the making: what was said and what it has established so far."""

    rng: Random
    agent: str | None = None
    role: str | None = None
    facts: dict[str, str] = field(default_factory=dict)
    messages: list[Message] = field(default_factory=list)
    length: int = 0
    spelling: str = "careful"

    def add(self, role: str, text: str) -> None:
        self.messages.append((role, text))
        self.length += len(text) + 8

    def exchange(self, user: str, assistant: str) -> None:
        self.add("user", user)
        self.add("assistant", assistant)

    def spelled(self, sentence: str) -> str:
        """A sentence as this user types it: with care, without capitals, without full stops."""
        if self.spelling == "careful":
            return sentence
        if self.spelling == "upper":
            return sentence.upper()
        bare = sentence.rstrip(".!?") if self.rng.random() < 0.7 else sentence
        return bare.lower() if self.spelling == "lower" else bare[:1].lower() + bare[1:]

    def value(self, kind: FactKind) -> str:
        drawn = kind.draw(self.rng, INVENTED)
        if self.spelling == "upper":
            return drawn.upper()
        return drawn.lower() if self.spelling == "lower" else drawn


# What the user may do in one turn. Each function adds one question and its answer.


def state_facts(scene: Scene, keys: list[str] | None = None) -> None:
    """One to three facts in one message, at times beside a greeting or a passage."""
    rng = scene.rng
    chosen = keys or rng.sample([kind.key for kind in KINDS], rng.choice((1, 1, 1, 2, 3)))
    sentences = []
    for key in chosen:
        scene.facts[key] = scene.value(BY_KEY[key])
        sentences.append(BY_KEY[key].statement(rng, scene.facts[key]))
    said = joined(rng, sentences) if len(sentences) == 2 else " ".join(sentences)
    said = scene.spelled(said)
    chance = rng.random()
    if chance < 0.15:
        said = scene.spelled(rng.choice(_HELLOS)) + " " + said
    elif chance < 0.2:
        said = f"{texts.passage(rng, 120)} {said}"
    elif chance < 0.25:
        said = f"{said} {texts.passage(rng, 120)}"
    scene.exchange(said, acknowledgement(scene, chosen))


def joined(rng: Random, sentences: list[str]) -> str:
    """Two sentences as one now and then: "My name is Ada and I live in Oslo."."""
    first, second = sentences
    if rng.random() < 0.5:
        return f"{first} {second}"
    if not second.startswith(("I ", "I'm ", *NAMES)):
        second = second[:1].lower() + second[1:]
    return f"{first[:-1]} and {second}"


def acknowledgement(scene: Scene, keys: list[str]) -> str:
    if "name" in keys:
        return f"Nice to meet you, {scene.facts['name']}."
    if len(keys) == 1:
        return f"Thank you. I will remember {BY_KEY[keys[0]].label}."
    return "Thank you. I will remember that."


def correct(scene: Scene) -> None:
    """A newer value for a fact; from here on the newest one holds."""
    rng = scene.rng
    key = rng.choice(sorted(scene.facts) or [kind.key for kind in KINDS])
    kind, old = BY_KEY[key], scene.facts.get(key)
    scene.facts[key] = scene.value(kind)
    sentence = kind.correction(rng, scene.facts[key], old)
    scene.exchange(scene.spelled(sentence), f"Thank you. I have updated {kind.label}.")


def answer(scene: Scene, key: str) -> str:
    kind = BY_KEY[key]
    return kind.answered(scene.facts[key]) if key in scene.facts else kind.refusal


def ask(scene: Scene, key: str | None = None) -> None:
    """One question about a fact, usually a known one; at times behind other text."""
    rng = scene.rng
    everything = [kind.key for kind in KINDS]
    known = sorted(scene.facts) if rng.random() < 0.8 else everything
    key = key or rng.choice(known or everything)
    question = scene.spelled(BY_KEY[key].question(rng))
    chance = rng.random()
    if chance < 0.05:
        question = f"{scene.spelled(rng.choice(_HELLOS))} {question}"
    elif chance < 0.12:
        question = f"{texts.passage(rng, rng.choice((60, 200)))} {question}"
    scene.exchange(question, answer(scene, key))


def ask_two(scene: Scene) -> None:
    """Two or three questions in one sentence, or two in a row."""
    rng = scene.rng
    kinds = rng.sample(KINDS, rng.choice((2, 2, 3)))
    subjects = [kind.subject(rng) for kind in kinds]
    listed = f"{', '.join(subjects[:-1])} and {subjects[-1]}"
    if len(kinds) == 2 and rng.random() < 0.6:
        questions = joined_questions(rng, kinds[0].question(rng), kinds[1].question(rng))
    else:
        order = rng.choice(("What is {}?", "What are {}?", "Tell me {}.", "Do you know {}?"))
        questions = order.format(listed)
    scene.exchange(scene.spelled(questions), " ".join(answer(scene, kind.key) for kind in kinds))


def joined_questions(rng: Random, first: str, second: str) -> str:
    if rng.random() < 0.5:
        return f"{first} {second}"
    return f"{first[:-1]} and {second[:1].lower()}{second[1:]}"


def state_and_ask(scene: Scene) -> None:
    """A fact and a question in one message: the question decides the answer."""
    rng = scene.rng
    stated, asked = rng.choice(KINDS), rng.choice(KINDS)
    scene.facts[stated.key] = scene.value(stated)
    said = f"{stated.statement(rng, scene.facts[stated.key])} {asked.question(rng)}"
    scene.exchange(scene.spelled(said), answer(scene, asked.key))


def ask_everything(scene: Scene) -> None:
    known = [kind.answered(scene.facts[kind.key]) for kind in KINDS if kind.key in scene.facts]
    question = scene.rng.choice(
        (
            "Tell me everything you know about me.",
            "What do you know about me?",
            "What have I told you?",
            "Tell me all you know about me.",
            "List what you know about me.",
        )
    )
    reply = " ".join(known) or "You have not told me anything about you."
    scene.exchange(scene.spelled(question), reply)


def ask_identity(scene: Scene) -> None:
    question = scene.rng.choice(
        (
            "What is your name?",
            "What is your name?",
            "Who are you?",
            "What are you called?",
            "Tell me your name.",
            "What's your name?",
            "Do you have a name?",
            "Which agent are you?",
            "Your name?",
        )
    )
    question = dressed(scene.rng, question) if scene.rng.random() < 0.15 else question
    reply = f"My name is {scene.agent}." if scene.agent else SELF
    scene.exchange(scene.spelled(question), reply)


def ask_role(scene: Scene) -> None:
    question = scene.rng.choice(
        ("What is your role?", "What is your job?", "What is your task?", "Your role?")
    )
    question = dressed(scene.rng, question) if scene.rng.random() < 0.2 else question
    reply = f"I am the {scene.role}." if scene.role else "I have no special role."
    scene.exchange(scene.spelled(question), reply)


_HELLOS = ("Hello!", "Hi!", "Hey!", "Hello there!", "Hi there.", "Hello.", "Hi.")
_GREETINGS = (
    *_HELLOS,
    "Good morning!",
    "Good evening.",
    "Good afternoon!",
    "Hello, how can you help me?",
    "Greetings!",
)
_SMALL_TALK: tuple[tuple[tuple[str, ...], str], ...] = (
    (
        ("How are you?", "How are you today?", "How do you do?", "How is it going?"),
        "I am fine, thank you. How are you?",
    ),
    (
        ("I am fine.", "I'm fine, thanks.", "I am well.", "Very well, thank you.", "I am good."),
        "I am glad to hear that.",
    ),
    (("I am sad.", "I am tired.", "Not so good.", "I feel bad."), "I am sorry to hear that."),
    (
        ("Thank you.", "Thanks!", "Thank you very much!", "Many thanks.", "Thanks a lot."),
        "You are welcome.",
    ),
    (
        ("What can you do?", "How can you help me?", "Help!", "Help me.", "What do you do?"),
        ABILITIES,
    ),
    (("Are you human?", "Are you a robot?", "Are you a person?", "What are you?"), SELF),
    (("Who made you?", "Where do you come from?"), "I am part of semantic."),
    (("Yes.", "Okay.", "Ok.", "Good.", "Great!", "Sure.", "Fine.", "Nice."), "Good."),
    (("No.", "Nope.", "No, thank you."), "All right."),
    (("Are you there?", "Test.", "Testing.", "Can you hear me?", "Ping."), "I am here."),
    (("Sorry.", "I am sorry.", "Excuse me."), "No problem."),
    (
        ("Forget everything.", "Forget it.", "Forget my name.", "Forget what I told you."),
        "I cannot forget.",
    ),
    (("How old are you?", "Where are you?", "Do you sleep?", "Do you like me?"), UNKNOWN),
)


def greet(scene: Scene) -> None:
    greeting = scene.rng.choice(_GREETINGS)
    if scene.agent and scene.rng.random() < 0.3:
        greeting = f"{scene.rng.choice(('Hello', 'Hi', 'Good morning', 'Hey'))} {scene.agent}!"
    if greeting == "Hello, how can you help me?":
        scene.exchange(scene.spelled(greeting), ABILITIES)
        return
    name = scene.facts.get("name")
    reply = f"Hello, {name}! How can I help you?" if name else "Hello! How can I help you?"
    scene.exchange(scene.spelled(greeting), reply)


def take_leave(scene: Scene) -> None:
    farewell = scene.rng.choice(("Goodbye!", "Bye.", "See you later.", "Good night.", "Bye bye!"))
    name = scene.facts.get("name")
    scene.exchange(scene.spelled(farewell), f"Goodbye, {name}!" if name else "Goodbye!")


def small_talk(scene: Scene) -> None:
    if scene.rng.random() < 0.25:
        feel(scene)
        return
    lines, reply = scene.rng.choice(_SMALL_TALK)
    scene.exchange(scene.spelled(scene.rng.choice(lines)), reply)


_GOOD = words("calm excited fine fit glad good great happy lucky proud relaxed well")
_BAD = words(
    """
    afraid alone angry bored busy cold confused hungry ill jealous lonely lost nervous sad scared
    shy sick sleepy stressed thirsty tired unhappy upset weak worried
    """
)


def feel(scene: Scene) -> None:
    """A feeling, which is neither a name nor a job, however much the sentence looks like one."""
    rng = scene.rng
    is_good = rng.random() < 0.4
    feeling = rng.choice(_GOOD if is_good else _BAD)
    if rng.random() < 0.5:
        degree = rng.choice(("a bit", "a little", "very", "so", "really", "quite", "rather"))
        feeling = f"{degree} {feeling}"
    opening = rng.choice(("I am", "I am", "I'm", "I feel", "I am feeling"))
    said = f"{opening} {feeling}{rng.choice(('', '', ' today', ' now'))}."
    reply = "I am glad to hear that." if is_good else "I am sorry to hear that."
    scene.exchange(scene.spelled(said), reply)


def do_sum(scene: Scene) -> None:
    """Plus and minus below a hundred, times up to twelve; larger numbers are declined."""
    rng = scene.rng
    word, sign = rng.choice((("plus", "+"), ("minus", "-"), ("times", "*")))
    limit = 13 if word == "times" else rng.choice((21, 100))
    x, y = rng.randrange(limit), rng.randrange(limit)
    result = {"plus": x + y, "minus": x - y, "times": x * y}[word]
    said = rng.choice((f"{x} {word} {y}", f"{x} {word} {y}", f"{x} {sign} {y}", f"{x}{sign}{y}"))
    question = rng.choice(("What is {}?", "How much is {}?", "{} = ?", "{}?", "Calculate {}."))
    reply = f"{x} {word} {y} is {result}."
    if rng.random() < 0.08:
        said, reply = f"{x + 100 * rng.randrange(1, 90)} {sign} {y}", UNKNOWN
    scene.exchange(scene.spelled(question.format(said)), reply)


def repeat(scene: Scene) -> None:
    """Words or a line of text to say again, letter for letter."""
    rng = scene.rng
    said = repeated_words(rng)
    if rng.random() < 0.15:
        said = rng.choice((texts.scene, texts.word_salad, texts.log_line))(rng).strip()
    elif rng.random() < 0.15:
        said = noise(rng)
    orders = ("Repeat after me:", "Repeat after me:", "Repeat:", "Say:", "Please say:", "Echo:")
    order = rng.choice((*orders, "Repeat this:", "Please repeat:", "Say", "Repeat", "Please say"))
    scene.exchange(f"{scene.spelled(order)} {said}", said)


def noise(rng: Random) -> str:
    """Words between brackets, quotes and signs, as in data and source code."""
    parts = []
    for _ in range(rng.randint(1, 6)):
        word = rng.choice((invented_word(rng), rng.choice(COMMON_WORDS), str(rng.randrange(99))))
        opening, closing = rng.choice(("()", "[]", "{}", '""', "<>", "''", "  ", "**", "__"))
        parts.append(
            f"{opening}{word}{closing}{rng.choice((' ', ', ', ': ', ' = ', '/', '-', ''))}"
        )
    return "".join(parts).strip()


def repeated_words(rng: Random) -> str:
    lists = (CODE_WORDS, COMMON_WORDS, THINGS, NAMES, CITIES)
    parts = []
    for _ in range(rng.choice((1, 2, 3, 4, 5, 6, 8, 12, 20))):
        chance = rng.random()
        if chance < 0.35:
            parts.append(invented_word(rng))
        elif chance < 0.4:
            parts.append(str(rng.randrange(1000)))
        elif chance < 0.43:
            parts.append(rng.choice(SYMBOLS))
        elif chance < 0.46:
            parts.append(code(rng))
        else:
            parts.append(rng.choice(rng.choice(lists)))
    said = " ".join(parts)
    return capitalised(said) + "." if rng.random() < 0.3 else said


def count(scene: Scene) -> None:
    rng = scene.rng
    start = 1 if rng.random() < 0.6 else rng.randrange(1, 120)
    end = start + rng.choice((2, 3, 4, 6, 9, 9, 14, 19, 19, 29, 39, 49, 99))
    order = f"Count to {end}." if start == 1 else f"Count from {start} to {end}."
    order = f"Count from 1 to {end}." if start == 1 and rng.random() < 0.4 else order
    numbers = ", ".join(str(number) for number in range(start, end + 1))
    scene.exchange(scene.spelled(order), f"{numbers}.")


def tell_story(scene: Scene) -> None:
    rng = scene.rng
    creature = rng.choice(CREATURES)
    adjective = rng.choice(("", "", "short ", "long "))
    order = f"{rng.choice(('Tell me', 'Tell', 'Write'))} a {adjective}story about a {creature}."
    if rng.random() < 0.3:
        order, creature = f"Tell me a {adjective}story.", "dragon"
    sentences = {"": 4, "short ": 2, "long ": 14}[adjective] + rng.randrange(3)
    scene.exchange(scene.spelled(order), texts.story(rng, creature, sentences))


def read(scene: Scene, characters: int | None = None) -> None:
    rng = scene.rng
    text = texts.passage(rng, characters or rng.choice((40, 80, 160, 320)))
    order = rng.choice(("Read this:", "Read this:", "Here is a text:", "Please read:", "Note:", ""))
    ending = rng.choice((" ", "\n", "\n\n")) if order else ""
    scene.exchange(f"{order}{ending}{text}", READ if order else SEEN)


def ask_unknown(scene: Scene) -> None:
    """Requests beyond a model of this size, which it should decline in one sentence."""
    rng = scene.rng
    thing, other, word = rng.choice(THINGS), rng.choice(THINGS), rng.choice(COMMON_WORDS)
    name, city = rng.choice(NAMES), rng.choice(CITIES)
    salad = " ".join(rng.choice(COMMON_WORDS) for _ in range(rng.randint(3, 12)))
    if rng.random() < 0.12:
        scene.exchange(about_a_text(rng), UNKNOWN)
        return
    question = rng.choice(
        (
            f"What is the capital of {rng.choice((city, capitalised(invented_word(rng))))}?",
            f"Who wrote the {thing} of {city}?",
            f"Write a poem about the {thing}.",
            f"Explain the {thing}.",
            f"Explain {word} to me.",
            f"How far is {city} from {rng.choice(CITIES)}?",
            f"Translate {word} into French.",
            f"Why is the {thing} {word}?",
            f"What is {rng.choice((thing, invented_word(rng), word))}?",
            f"What is a {thing}?",
            f"How do I build a {thing}?",
            f"Who is {name}?",
            f"Where does {name} live?",
            f"What is the job of {name}?",
            f"When did the {thing} meet the {other}?",
            f"Write a program for the {thing}.",
            f"What will the weather be in {city}?",
            f"Which {thing} is the best?",
            "Tell me a joke.",
            "Sing a song.",
            f"{rng.choice(('What', 'Why', 'How', 'When', 'Who', 'Which', 'Where'))} {salad}?",
            f"{rng.choice(('Can', 'Do', 'Is', 'Are', 'Could', 'Will'))} {salad}?",
            f"{rng.choice(('Write', 'Explain', 'Make', 'Find', 'Show me', 'Give me'))} {salad}.",
            rng.choice(SYMBOLS) * rng.randint(1, 4),
            invented_word(rng),
        )
    )
    scene.exchange(scene.spelled(question), UNKNOWN)


def about_a_text(rng: Random) -> str:
    """A text and a request about it."""
    text = texts.passage(rng, rng.choice((60, 200)))
    order = rng.choice(("Summarise this:", "Translate this:", "Correct this text:", "Explain:"))
    order = rng.choice((order, f"Please {order[:1].lower()}{order[1:]}", "Summarise the text:"))
    question = rng.choice(
        (
            "What does this mean?",
            "What does this do?",
            "Is this true?",
            "What does this code do?",
            "What is this text about?",
        )
    )
    return rng.choice((f"{order} {text}", f"{text} {question}", f"{text}\n\n{question}"))


Act = Callable[[Scene], None]

# Weighted by how much practice each takes; facts come first because they are what the model is for.
_LIVELY: tuple[tuple[int, Act], ...] = (
    (22, state_facts),
    (30, ask),
    (4, ask_two),
    (4, state_and_ask),
    (4, correct),
    (2, ask_everything),
    (3, ask_identity),
    (2, ask_role),
    (2, greet),
    (4, small_talk),
    (1, take_leave),
    (7, do_sum),
    (6, repeat),
    (2, count),
    (2, tell_story),
    (8, read),
    (5, ask_unknown),
)
_BETWEEN: tuple[tuple[int, Act], ...] = (
    (4, ask),
    (1, correct),
    (1, ask_two),
    (1, ask_identity),
    (1, ask_role),
    (1, greet),
    (1, small_talk),
    (2, do_sum),
    (2, repeat),
    (1, tell_story),
    (2, ask_unknown),
)


def act(scene: Scene, acts: tuple[tuple[int, Act], ...]) -> None:
    scene.rng.choices([a for _, a in acts], [weight for weight, _ in acts])[0](scene)


# The system message.


def open_with_system(scene: Scene, characters: int) -> None:
    """Names the agent, its role or facts of the user; at times around a long shared text."""
    rng = scene.rng
    sentences = [introduction(scene)] if rng.random() < 0.75 else []
    if rng.random() < 0.5 or not sentences:
        sentences.append(
            rng.choice(
                (
                    "You are a helpful assistant.",
                    "Remember what the user tells you.",
                    "Be brief.",
                    "Answer in one sentence.",
                    "Help the user.",
                    "You work together with other agents.",
                )
            )
        )
    break_ = rng.choice((" ", " ", " ", "\n", "\n\n"))
    if rng.random() < 0.3:
        mark = "- " if "\n" in break_ and rng.random() < 0.5 else ""
        for kind in rng.sample(KINDS, rng.choice((1, 1, 2, 4))):
            scene.facts[kind.key] = kind.draw(rng, INVENTED)
            sentences.append(mark + kind.about_user(rng, scene.facts[kind.key]))
    if rng.random() < 0.2:
        rng.shuffle(sentences)
    if rng.random() < 0.25:
        text = texts.passage(rng, int(characters * rng.uniform(0.02, 0.5)))
        sentences.insert(rng.choice((0, len(sentences))), text)
    scene.add("system", break_.join(sentences))


def introduction(scene: Scene) -> str:
    """The sentence that gives the agent its name, and maybe its role."""
    rng = scene.rng
    number = rng.randrange(1, 100)
    scene.agent = rng.choice(
        (
            rng.choice(NAMES),
            rng.choice(NAMES),
            invented_word(rng).title(),
            f"{rng.choice(('agent', 'Agent', 'Worker', 'Bot'))} {number}",
            f"{rng.choice(('agent', 'worker'))}-{number}",
        )
    )
    if rng.random() < 0.25:
        scene.role = rng.choice(ROLES)
        team = rng.choice(("", "", " of the team", f" of a team of {number} agents"))
        return f"You are {scene.agent}, the {scene.role}{team}."
    return rng.choice(
        (
            f"You are {scene.agent}.",
            f"You are {scene.agent}, a helpful agent.",
            f"You are {scene.agent}, a {rng.choice(THINGS)} agent.",
            f"Your name is {scene.agent}.",
            f"You are an agent called {scene.agent}.",
            f"You are a helpful assistant called {scene.agent}.",
        )
    )


# Whole conversations.


def lively(scene: Scene, characters: int) -> None:
    """Facts, questions and small talk in quick succession: short distances, many updates."""
    while scene.length < characters:
        act(scene, _LIVELY)


def patient(scene: Scene, characters: int) -> None:
    """Facts first, then much else, then the questions: one statement, a long way back."""
    rng = scene.rng
    keys = rng.sample([kind.key for kind in KINDS], rng.choice((3, 5, 7, 8)))
    pending = [keys[i : i + 2] for i in range(0, len(keys), 2)] if rng.random() < 0.5 else [keys]
    spread = rng.choice((0.0, 0.0, 0.3, 0.6)) * characters
    grain = rng.choice((60, 200, 600, 2000, characters))
    enough = characters - 480
    state_facts(scene, pending.pop(0))
    while scene.length < enough:
        if pending and rng.random() * spread <= scene.length:
            state_facts(scene, pending.pop(0))
        elif rng.random() < 0.3:
            act(scene, _BETWEEN)
        else:
            read(scene, min(int(grain * rng.uniform(0.5, 1.5)), int(enough - scene.length)))
    for kind in rng.sample(KINDS, len(KINDS)):
        if rng.random() < 0.2:
            act(scene, _BETWEEN)
        ask(scene, kind.key)


_SPELLINGS = ("careful",) * 14 + ("casual",) * 4 + ("lower",) * 2 + ("upper",)


def dialogue(rng: Random, characters: int, patience: float = 0.6) -> list[Message]:
    """One conversation of about that many characters."""
    scene = Scene(rng, spelling=rng.choice(_SPELLINGS))
    if rng.random() < 0.5:
        open_with_system(scene, characters)
    plan = patient if rng.random() < patience else lively
    plan(scene, characters)
    return scene.messages
