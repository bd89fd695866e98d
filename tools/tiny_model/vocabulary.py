"""The words of semantic-tiny's training data: lists of values, common words and invented words.

Knows nothing of facts, turns or dialogues; only draws words from a random generator.
"""

from random import Random


def words(text: str) -> list[str]:
    return text.split()


NAMES = words(
    """
    Ada Amir Anna Arun Bea Ben Bo Cara Chen Cleo Dan Dana Dev Diego Edith Eli Elsa Emma Eva
    Farid Fay Finn Fiona Gus Hana Hugo Ida Igor Ines Iris Ivan Jack Jia Joan Jonas Kai Kira Kofi
    Lars Lena Leo Lily Lucia Luis Maja Marco Maya Milo Mina Nadia Nico Nina Noah Nora Olga Omar
    Oscar Otto Paul Petra Pia Priya Quinn Rana Ravi Rosa Ruth Sam Sara Sofia Stefan Tara Theo
    Tom Uma Umar Vera Vic Victor Wanda Will Wren Xena Yara Yusuf Zane Zoe
    """
)

CITIES = words(
    """
    Accra Amman Athens Austin Basel Bergen Berlin Bogota Boston Cairo Chicago Cork Dakar Delhi
    Denver Dublin Florence Geneva Ghent Glasgow Hamburg Hanoi Havana Helsinki Istanbul Kyoto
    Lagos Leeds Lima Lisbon London Lyon Madrid Malmo Manila Milan Montreal Mumbai Munich Nairobi
    Naples Nice Oslo Oxford Paris Perth Porto Prague Quito Riga Rome Seattle Seoul Sofia Split
    Sydney Tallinn Tokyo Toronto Turin Utrecht Venice Vienna Warsaw York Zagreb Zurich
    """
)

PETS = words(
    """
    cat dog parrot rabbit turtle hamster goldfish lizard pony ferret gecko mouse owl frog snake
    rat canary donkey goat duck hedgehog spider tortoise chicken pigeon kitten puppy alpaca
    """
)

COLOURS = words(
    """
    red blue green yellow purple orange black white pink brown grey teal gold silver violet
    indigo crimson amber ivory scarlet olive navy beige maroon
    """
)

FOODS = words(
    """
    pizza sushi tacos soup pasta curry salad ramen pancakes dumplings bread cheese apples rice
    noodles cake toast porridge stew beans chocolate mushrooms olives waffles omelette couscous
    risotto falafel hummus pears cherries biscuits chips mango pudding gnocchi
    """
)

JOBS = words(
    """
    baker nurse pilot farmer teacher painter driver singer doctor lawyer writer chef sailor
    tailor builder gardener actor engineer librarian plumber carpenter dentist editor florist
    potter waiter cleaner biologist electrician photographer translator miner postman judge
    architect
    """
)

HOBBIES = words(
    """
    chess tennis fishing sewing running reading hiking cooking drawing dancing sailing singing
    skating climbing gaming knitting cycling pottery swimming rowing juggling gardening yoga
    painting astronomy photography writing baking skiing surfing origami
    """
)

CODE_WORDS = words(
    """
    anchor arrow autumn badge basket beacon bishop bottle bridge bronze button canyon candle
    carpet castle cedar circle clover cobalt copper coral cotton crystal desert dragon eagle
    ember engine falcon feather fiddle forest galaxy garden glacier granite hammer harbour hazel
    helmet island jasper jungle kettle ladder lantern lemon magnet maple marble meadow mirror
    needle nickel ocean orchard paper pebble pepper pillow planet pocket quartz quiver rabbit
    ribbon river rocket saddle saffron shadow shell signal spruce stone summit thunder timber
    tunnel umbrella valley velvet violin walnut whisper willow window winter yonder zephyr
    """
)

ROLES = words(
    """
    planner writer critic researcher reviewer tester coder translator editor tutor analyst
    """
)

COMMON_WORDS = words(
    """
    a about above across after again against ago air all almost along already also always among
    an and animal another answer any are area around as ask at away back bad bag ball bank be
    because bed been before began behind being below best better between big bird black boat
    body book both box boy break bring brother build busy but buy by call came can car care
    carry case catch chair change check child city class clean clear clock close cloud coat cold
    come company cook cool corner could country course cup cut dark data day deep did different
    dinner do does done door down draw dream drink drive dry during each early earth east eat
    edge egg eight else end enough even evening ever every example eye face fact fall family far
    farm fast father feel few field file find fine fire first fish five floor flower fly follow
    food foot for forget four free fresh friend from front full game gave get girl give glass go
    good got grass great green ground group grow had half hand happy hard has have he head hear
    heart heat heavy help her here high hill him his hold home hope horse hot hour house how
    however hundred ice idea if important in inside into is it job join jump just keep kind king
    kitchen knew know lake land language large last late later laugh law lead learn leave left
    less let letter life light like line list listen little live long look lost lot love low
    lunch machine made make man many map market may me mean meet memory men might mile milk
    million mind minute model moment money month moon more morning most mother mountain mouth
    move much music must my name near need never new news next night nine no north not note
    nothing now number of off office often oil old on once one only open or order other our out
    over own page pair part party pass past pay people perhaps person picture piece place plan
    plant play please point poor possible power problem put question quick quiet rain read ready
    real red rest right road rock room round run said same sand saw say school sea second see
    seem send sentence set seven several she ship shop short should show side simple since sing
    sister sit six size sky sleep slow small snow so some song soon sound south space speak
    spring stand star start state station stay step still stop story street strong student study
    such summer sun sure system table take talk tall teach team tell ten test text than that the
    their them then there these they thing think this those thought three through time to today
    together told too took top town train travel tree true try turn two under until up us use
    very visit voice wait walk wall want warm was watch water way we weather week well went were
    west what wheel when where which while white who why wide wind with without woman wood word
    work world would write year yellow yes yet you young your
    """
)

THINGS = words(
    """
    river boat clock letter engine garden bottle mountain book table lamp train cloud bicycle
    computer cup fence field guitar house key kitchen ladder market moon museum paper piano road
    rope school ship shop star station stone street tower tree wall wheel wind window
    """
)

CREATURES = words(
    """
    dragon fox bear wolf robot bird fish horse rabbit owl cat dog mouse whale tiger frog
    """
)

SYMBOLS = [
    "\N{GRINNING FACE}",
    "\N{ROCKET}",
    "\N{HEAVY BLACK HEART}",
    "\N{SNOWMAN}",
    "\N{BLACK STAR}",
    "\N{LATIN SMALL LETTER E WITH ACUTE}",
    "\N{LATIN SMALL LETTER U WITH DIAERESIS}",
    "\N{GREEK SMALL LETTER LAMDA}",
    "\N{CYRILLIC SMALL LETTER ZHE}",
    "\N{CJK UNIFIED IDEOGRAPH-4E2D}",
    "\N{HIRAGANA LETTER A}",
    "\N{EURO SIGN}",
]

_SOURCES = (NAMES, CITIES, PETS, COLOURS, FOODS, JOBS, HOBBIES, CODE_WORDS, COMMON_WORDS)
_ONSETS = words(
    """
    . . . . . . . . b bl br c ch cl cr d dr f fl fr g gl gr h j k kl kr l m n p pl pr qu r s sc sh
    sl sm sn sp st str t th tr v w wh y z
    """
)
_VOWELS = words("a e i o u a e i o u ai au ea ee ei eu ia ie io oa oi oo ou ue y")
_CODAS = words(
    """
    . . . . b ck ct d f ft g k l ld ll lt m mp n nd ng nk nt p r rd rk rn rt s sk ss st t th x z
    """
)
_LETTERS = "abcdefghijklmnopqrstuvwxyz"


_ACCENTS = {"a": "áàâäå", "c": "ç", "e": "éèêë", "i": "íîï", "n": "ñ", "o": "óôöø", "u": "úûü"}
_SEPARATORS = "---- _./:"


def invented_word(rng: Random) -> str:
    """A word no list contains, so that the model learns to copy rather than to recognise."""
    chance = rng.random()
    if chance < 0.15:
        word = "".join(rng.choice(_LETTERS) for _ in range(rng.choice((2, 3, 4, 5, 6, 7, 9, 11))))
    elif chance < 0.4:
        word = spliced_word(rng)
    elif chance < 0.65:
        word = altered_word(rng, rng.choice(rng.choice(_SOURCES)).lower())
    else:
        word = "".join(syllable(rng) for _ in range(rng.choice((1, 2, 2, 2, 3, 4))))
    return accented(rng, word) if rng.random() < 0.04 else word


def syllable(rng: Random) -> str:
    onset, coda = rng.choice(_ONSETS).strip("."), rng.choice(_CODAS).strip(".")
    return onset + rng.choice(_VOWELS) + coda


def spliced_word(rng: Random) -> str:
    """The beginning of one listed word and the end of another: English pieces, no English word."""
    first, second = (rng.choice(rng.choice(_SOURCES)).lower() for _ in range(2))
    return first[: rng.randint(1, 7)] + second[-rng.randint(1, 5) :]


def altered_word(rng: Random, word: str) -> str:
    """A word that looks like the given one at first: the hardest to tell from it."""
    if len(word) < 3:
        return word + syllable(rng)
    at = rng.randrange(1, len(word))
    letter = rng.choice(_LETTERS)
    other = rng.choice(rng.choice(_SOURCES)).lower()
    return rng.choice(
        (
            word[: at + 1] + syllable(rng),
            word[: at + 1] + syllable(rng) + syllable(rng),
            word[: at + 1] + other[-rng.randint(1, 6) :],
            word[: at + 1] + other[: rng.randint(1, 6)],
            word + syllable(rng),
            word[:at] + letter + word[at:],
            word[:at] + letter + word[at + 1 :],
            word[:at] + word[at + 1 :],
            word[: at - 1] + word[at] + word[at - 1] + word[at + 1 :],
            word[:at] + word[at - 1 :],
        )
    )


def accented(rng: Random, word: str) -> str:
    """The word with an accent on one of its letters, if one of them can carry any."""
    places = [index for index, letter in enumerate(word) if letter in _ACCENTS]
    if not places:
        return word
    at = rng.choice(places)
    return word[:at] + rng.choice(_ACCENTS[word[at]]) + word[at + 1 :]


def invented_phrase(rng: Random) -> str:
    """One invented word or, less often, two or three words of mixed origin."""
    if rng.random() < 0.75:
        return invented_word(rng)
    words = [
        invented_word(rng) if rng.random() < 0.5 else rng.choice(COMMON_WORDS)
        for _ in range(rng.randint(2, 3))
    ]
    return rng.choice((" ", " ", " ", "-")).join(words)


def code(rng: Random, invented: float = 0.4) -> str:
    """A two-part code such as "velvet 42"; now and then another shape."""
    shape = rng.random()
    word = invented_word(rng) if rng.random() < invented else rng.choice(CODE_WORDS)
    word = rng.choice((word.upper(), word.title())) if rng.random() < 0.15 else word
    if shape < 0.62:
        return f"{word} {rng.randrange(10, 100)}"
    if shape < 0.72:
        return f"{word}-{rng.randrange(1, 10_000)}"
    if shape < 0.8:
        return str(rng.randrange(1, 1_000_000))
    if shape < 0.86:
        return mixed_characters(rng, rng.randint(3, 8))
    parts = [
        rng.choice((word, str(rng.randrange(1000)), mixed_characters(rng, rng.randint(1, 4))))
        for _ in range(rng.randint(2, 4))
    ]
    said = rng.choice(_SEPARATORS).join(parts)
    return said.lower() if rng.random() < 0.2 else said


def mixed_characters(rng: Random, length: int) -> str:
    return "".join(rng.choice((_LETTERS + "0123456789").upper()) for _ in range(length))


def with_article(noun: str) -> str:
    """The noun behind "a" or "an", by its first letter."""
    return f"an {noun}" if noun[0].lower() in "aeiou" else f"a {noun}"


def capitalised(text: str) -> str:
    """The text with its first letter in upper case and the rest left alone."""
    return text[:1].upper() + text[1:]
