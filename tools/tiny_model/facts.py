"""The eight kinds of fact that a user may state: statements, questions and answers.

Knows one sentence at a time; the conversation so far belongs to the dialogue.
"""

from dataclasses import dataclass
from random import Random

from tools.tiny_model import vocabulary
from tools.tiny_model.vocabulary import capitalised, invented_phrase, with_article


@dataclass(frozen=True, slots=True)
class FactKind:
    """One kind of fact.

    In templates {v} is the value as a sentence says it, {o} the value before it, {who} a person;
    {n}, {c} and {t} are a name, a city and a thing that only stand beside the fact.
    """

    key: str
    label: str
    subjects: tuple[str, ...]
    statements: tuple[str, ...]
    questions: tuple[str, ...]
    answer: str
    of_others: tuple[str, ...]
    values: tuple[str, ...] = ()
    corrections: tuple[str, ...] = ()
    takes_article: bool = False
    is_proper: bool = False

    @property
    def refusal(self) -> str:
        return f"You have not told me {self.label}."

    def subject(self, rng: Random) -> str:
        return rng.choice(self.subjects).format(t=rng.choice(vocabulary.THINGS))

    def said(self, value: str) -> str:
        return with_article(value) if self.takes_article else value

    def answered(self, value: str) -> str:
        return self.answer.format(v=self.said(value))

    def draw(self, rng: Random, invented: float = 0.4) -> str:
        """A value of this kind: from the list, or invented with the given probability."""
        if not self.values:
            return vocabulary.code(rng, invented)
        value = self.word(rng, invented)
        if rng.random() < 0.08:
            value = self.compound(rng, value, self.word(rng, invented))
        return value.title() if self.is_proper else value

    def word(self, rng: Random, invented: float) -> str:
        """A listed value, one that looks like a listed value at first, or an invented phrase."""
        if rng.random() >= invented:
            return rng.choice(self.values)
        if rng.random() < 0.25:
            return vocabulary.altered_word(rng, rng.choice(self.values).lower())
        return invented_phrase(rng)

    def compound(self, rng: Random, first: str, second: str) -> str:
        """A value of several words, which has to be remembered whole."""
        if self.is_proper:
            return rng.choice(_PROPER_COMPOUNDS).format(a=first, b=second)
        both = f"{first} and {self.said(second)}"
        beside = f"{rng.choice(vocabulary.COMMON_WORDS)} {first}"
        return rng.choice((both, both, beside, beside, f"{first} {second}", f"{first}-{second}"))

    def statement(self, rng: Random, value: str) -> str:
        generic = f"{capitalised(self.subject(rng))} is {{v}}."
        template = rng.choice((*self.statements, generic))
        said = f'"{self.said(value)}"' if rng.random() < 0.03 else self.said(value)
        return template.format(
            v=said,
            n=rng.choice(vocabulary.NAMES),
            c=rng.choice(vocabulary.CITIES),
            t=rng.choice(vocabulary.THINGS),
        )

    def correction(self, rng: Random, value: str, old: str | None) -> str:
        """A sentence after which the new value holds; it may also mention the old one."""
        templates = [
            "Actually, {s} is {v} now.",
            "Actually, {s} is {v}.",
            "Correction: {s} is {v}.",
            "Sorry, {s} is {v}.",
            "From now on {s} is {v}.",
            "I was wrong, {s} is {v}.",
            "{S} is {v} now.",
        ]
        if old is not None:
            templates += ["{S} is {v} now, not {o}.", "{S} is not {o} any more, it is {v}."]
            templates += self.corrections
        subject = self.subject(rng)
        return rng.choice(templates).format(
            s=subject, S=capitalised(subject), v=self.said(value), o=self.said(old or value)
        )

    def question(self, rng: Random) -> str:
        subject = self.subject(rng)
        generic = rng.choice(_GENERIC_QUESTIONS).format(s=subject, S=capitalised(subject))
        question = generic if rng.random() < 0.5 else rng.choice(self.questions)
        return dressed(rng, question) if rng.random() < 0.15 else question

    def about_user(self, rng: Random, value: str) -> str:
        """The fact as a system message states it, in the third person."""
        subject = self.subject(rng).replace("my ", "the user's ")
        sentence = f"{capitalised(subject)} is {self.said(value)}."
        if rng.random() < 0.1:
            return f'{capitalised(subject)} is "{self.said(value)}".'
        if self.key == "code" or rng.random() < 0.5:
            return sentence
        return capitalised(self.about(rng, "the user", value))

    def about(self, rng: Random, who: str, value: str) -> str:
        """The fact about another person."""
        owned = f"{{who}}'s {rng.choice(self.subjects).removeprefix('my ')} is {{v}}."
        templates = self.of_others if self.key == "code" else (*self.of_others, owned)
        return rng.choice(templates).format(who=who, v=self.said(value))


def dressed(rng: Random, question: str) -> str:
    """The question with a word or two around it."""
    lower = question[:1].lower() + question[1:]
    opening = rng.choice(("And ", "So, ", "Now, ", "Please, ", "Okay, ", "Hey, ", "Tell me: "))
    ending = rng.choice((" again", " now", ", please", ""))
    return rng.choice((opening + lower, question[:-1] + ending + question[-1]))


_GENERIC_QUESTIONS = (
    "What is {s}?",
    "What is {s}?",
    "What's {s}?",
    "Tell me {s}.",
    "Do you know {s}?",
    "Do you remember {s}?",
    "Can you tell me {s}?",
    "Please tell me {s}.",
    "{S}?",
)

_PROPER_COMPOUNDS = (
    "{a} {b}",
    "{a} {b}",
    "{a}-{b}",
    "{a} de {b}",
    "{a} upon {b}",
    "new {a}",
    "san {a}",
    "st. {a}",
    "o'{a}",
)

KINDS: tuple[FactKind, ...] = (
    FactKind(
        key="name",
        label="your name",
        subjects=("my name",),
        statements=(
            "My name is {v}.",
            "I am {v}.",
            "I'm {v}.",
            "I am called {v}.",
            "People call me {v}.",
            "Call me {v}.",
            "You can call me {v}.",
            "My name is {v}, nice to meet you.",
            "My name is {v} and I come from {c}.",
        ),
        questions=(
            "Who am I?",
            "What am I called?",
            "Say my name.",
            "How do people call me?",
            "Do I have a name?",
        ),
        answer="Your name is {v}.",
        of_others=("{who} is called {v}.", "The name of {who} is {v}."),
        values=tuple(vocabulary.NAMES),
        is_proper=True,
    ),
    FactKind(
        key="city",
        label="your city",
        subjects=("my city", "my home town"),
        statements=(
            "I live in {v}.",
            "My home is in {v}.",
            "I moved to {v}.",
            "I am living in {v}.",
            "My house is in {v}.",
            "I live in {v} near the {t}.",
            "I live in {v} with my family.",
            "I moved from {c} to {v}.",
            "I was born in {c} but I live in {v}.",
            "{n} and I live in {v}.",
        ),
        corrections=(
            "I have moved from {o} to {v}.",
            "I moved from {o} to {v}.",
            "I left {o} and live in {v} now.",
        ),
        questions=(
            "Where do I live?",
            "Which city do I live in?",
            "What city do I live in?",
            "Where is my home?",
            "Do you remember where I live?",
            "Do I have a home?",
        ),
        answer="You live in {v}.",
        of_others=("{who} lives in {v}.", "{who} moved to {v}.", "The city of {who} is {v}."),
        values=tuple(vocabulary.CITIES),
        is_proper=True,
    ),
    FactKind(
        key="pet",
        label="your pet",
        subjects=("my pet", "my pet animal"),
        statements=(
            "I have {v}.",
            "I have {v} as a pet.",
            "I own {v}.",
            "I have {v} at home.",
            "I have {v} called {n}.",
            "I have {v} and it is called {n}.",
        ),
        questions=(
            "What pet do I have?",
            "Which pet do I have?",
            "Which animal do I have?",
            "Do I have a pet?",
            "Do I have an animal?",
            "What kind of pet do I have?",
        ),
        answer="Your pet is {v}.",
        of_others=("{who} has {v}.", "The pet of {who} is {v}.", "{who} owns {v}."),
        values=tuple(vocabulary.PETS),
        takes_article=True,
    ),
    FactKind(
        key="colour",
        label="your favourite colour",
        subjects=("my favourite colour", "my favorite color", "my favourite color"),
        statements=(
            "I love the colour {v}.",
            "I love the color {v}.",
            "The colour I like best is {v}.",
            "The color I like best is {v}.",
            "I like {v} more than any other colour.",
        ),
        questions=(
            "Which colour do I love?",
            "Which color do I love?",
            "What colour do I like best?",
            "What color do I like best?",
            "Which colour do I like?",
            "Do I have a favourite colour?",
        ),
        answer="Your favourite colour is {v}.",
        of_others=(
            "The favourite colour of {who} is {v}.",
            "{who} loves the colour {v}.",
            "The favorite color of {who} is {v}.",
        ),
        values=tuple(vocabulary.COLOURS),
    ),
    FactKind(
        key="food",
        label="your favourite food",
        subjects=("my favourite food", "my favorite food"),
        statements=(
            "I love to eat {v}.",
            "I like to eat {v}.",
            "The food I like best is {v}.",
            "I eat {v} every day.",
            "I like to eat {v} with {n}.",
        ),
        questions=(
            "What do I love to eat?",
            "What do I like to eat?",
            "Which food do I like best?",
            "What food do I love?",
            "Do I have a favourite food?",
        ),
        answer="Your favourite food is {v}.",
        of_others=("The favourite food of {who} is {v}.", "{who} loves to eat {v}."),
        values=tuple(vocabulary.FOODS),
    ),
    FactKind(
        key="job",
        label="your job",
        subjects=("my job", "my profession"),
        statements=(
            "I work as {v}.",
            "I am {v}.",
            "I'm {v}.",
            "I am {v} by trade.",
            "I earn my living as {v}.",
            "I have a job as {v}.",
            "I work as {v} in {c}.",
            "I work at the {t} as {v}.",
            "I work at a {t} as {v}.",
            "I am working as {v}.",
        ),
        questions=(
            "What do I work as?",
            "What do I do for a living?",
            "What is my work?",
            "Which job do I have?",
            "Do I have a job?",
        ),
        answer="You work as {v}.",
        of_others=("{who} works as {v}.", "The job of {who} is {v}."),
        values=tuple(vocabulary.JOBS),
        takes_article=True,
    ),
    FactKind(
        key="hobby",
        label="your hobby",
        subjects=("my hobby", "my favourite hobby", "my favorite hobby"),
        statements=(
            "I enjoy {v}.",
            "In my free time I enjoy {v}.",
            "For fun I do {v}.",
            "I spend my weekends on {v}.",
            "I enjoy {v} with {n}.",
        ),
        questions=(
            "What do I enjoy?",
            "What do I do for fun?",
            "What do I do in my free time?",
            "Which hobby do I have?",
            "Do I have a hobby?",
        ),
        answer="Your hobby is {v}.",
        of_others=("The hobby of {who} is {v}.", "{who} enjoys {v}."),
        values=tuple(vocabulary.HOBBIES),
    ),
    FactKind(
        key="code",
        label="the code",
        subjects=(
            "the code",
            "the secret code",
            "the code word",
            "the code word for today",
            "the password",
            "the secret word",
            "the launch code",
            "the {t} code",
            "the code for the {t}",
            "the code word for the {t}",
            "my code word",
            "my code",
        ),
        statements=(
            "Remember the code {v}.",
            "Keep this code for me: {v}.",
            "Remember this code: {v}.",
            "The secret is {v}.",
        ),
        questions=(
            "Which code did I give you?",
            "What code did I tell you?",
            "Which code should you remember?",
            "What is the secret?",
            "Repeat the code.",
            "Did I give you a code?",
        ),
        answer="The code is {v}.",
        of_others=("The code of {who} is {v}.", "{who} has the code {v}."),
    ),
)

BY_KEY = {kind.key: kind for kind in KINDS}
