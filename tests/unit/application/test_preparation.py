"""What is refused before it costs anything."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace

import pytest

from semantic.application.chat.preparation import Attachments, ImageInput, Preparation
from semantic.application.chat.replay import Replay
from semantic.application.chat.turn_cache import TurnCache
from semantic.application.serving import _is_short
from semantic.domain.chat import Attachment, Chat, Message, Tool, ToolCall
from semantic.domain.errors import ContextOverflowError, InvalidRequestError
from semantic.domain.grammar import Grammar
from semantic.domain.value_objects import SamplingParams, ThinkingBudget, Thoughts
from semantic.ports.chat import Marks, RenderedChat
from semantic.ports.serving import Ask, Prompt
from tests.support.fake_chat_format import CALL_MARKS, FakeChatFormat
from tests.support.fake_tokenizer import ByteTokenizer

LIMIT, LONGEST, COUNTED = 100, 4, 1 << 18


class Untouched(ByteTokenizer):
    """It must not be asked for the tokens of a long text."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        assert len(text) <= COUNTED
        return super().encode(text, add_special_tokens=add_special_tokens)


class UntouchedFormat(FakeChatFormat):
    """It must not be asked to render a long conversation."""

    def render(self, chat: Chat) -> RenderedChat:
        assert chat.length <= COUNTED
        return super().render(chat)


def preparation(marks: Marks | None = None) -> Preparation:
    chat_format, tokenizer = UntouchedFormat(marks), Untouched()
    replay = Replay(chat_format, TurnCache(1 << 20), b"model", tokenizer.eos_token_ids)
    return Preparation(tokenizer, chat_format, replay, lambda _: None, LIMIT, longest_token=LONGEST)


LONG = "a" * (COUNTED + 1)
PROMPTS = [
    (LONG, False),
    (Chat((Message("user", LONG),)), True),
    (Chat(tuple(Message("user", LONG[: COUNTED // 2 + 1]) for _ in range(2))), True),
]
every_prompt = pytest.mark.parametrize(
    ("prompt", "is_chat"), PROMPTS, ids=["text", "message", "messages"]
)


@every_prompt
def test_a_text_that_cannot_fit_is_refused_before_its_tokens_are_counted(
    prompt: Prompt, is_chat: bool
) -> None:
    for ask in (preparation().tokens, lambda p: preparation().prepare(Ask(p, SamplingParams()))):
        with pytest.raises(ContextOverflowError) as caught:
            ask(prompt)
        assert caught.value.prompt_tokens >= COUNTED // LONGEST
        assert (caught.value.limit, caught.value.is_chat) == (LIMIT, is_chat)


def test_a_refusal_says_how_long_a_prompt_is_that_can_be_counted() -> None:
    with pytest.raises(ContextOverflowError) as caught:
        preparation().prepare(Ask("a" * 5000, SamplingParams()))
    assert caught.value.prompt_tokens == 5001
    assert len(preparation().tokens("a" * 5000)) == 5001


class Blanks(ByteTokenizer):
    """64 spaces are a token of it. `encoded` are the lengths of the texts that it was given."""

    def __init__(self) -> None:
        super().__init__()
        self.encoded: list[int] = []

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        self.encoded.append(len(text))
        blanks = text.replace(" " * 64, "\t")
        return super().encode(blanks, add_special_tokens=add_special_tokens)


@pytest.mark.parametrize(
    ("prompt", "encoded", "found"),
    [
        ("a" * 300_000, [8000], 8001),
        ("a" * 3000 + " " * 300_000, [8000], 3087),
        (Chat((Message("user", "b" * 1500), *[Message("user", "c" * 3000)] * 99)), [8000], 8001),
        (" " * 300_000 + "a" * 3000, [8000, 303_000], 7720),
    ],
    ids=["dense", "dense at first", "messages", "dense at last"],
)
def test_a_long_text_is_refused_by_the_tokens_of_its_beginning(
    prompt: Prompt, encoded: list[int], found: int
) -> None:
    tokenizer, chat_format = Blanks(), UntouchedFormat()
    replay = Replay(chat_format, TurnCache(1), b"model", tokenizer.eos_token_ids)
    tight = Preparation(tokenizer, chat_format, replay, lambda _: None, 1000, longest_token=4096)
    with pytest.raises(ContextOverflowError) as caught:
        tight.prepare(Ask(prompt, SamplingParams()))
    assert (tokenizer.encoded, caught.value.prompt_tokens) == (encoded, found)


def test_a_long_text_that_fits_is_taken() -> None:
    tokenizer, chat_format = Blanks(), UntouchedFormat()
    replay = Replay(chat_format, TurnCache(1), b"model", tokenizer.eos_token_ids)
    ample = Preparation(tokenizer, chat_format, replay, lambda _: None, 9000, longest_token=4096)
    prepared = ample.prepare(Ask(" " * 300_000 + "a" * 3000, SamplingParams()))
    assert (len(prepared.tokens), prepared.max_tokens) == (7720, 1280)


@pytest.mark.parametrize(
    ("chat", "words"),
    [
        (Chat((Message("user", ""),) * 40_000), "messages: expected at most 32768, got 40000"),
        (
            Chat((Message("user", "Hello"),), (Tool("go"),) * 5000),
            "tools: expected at most 4096, got 5000",
        ),
    ],
    ids=["messages", "tools"],
)
def test_what_no_template_renders_soon_is_refused_by_its_number(
    chat: Chat, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rendered: list[Chat] = []
    monkeypatch.setattr(UntouchedFormat, "render", lambda _, chat: rendered.append(chat))
    with pytest.raises(InvalidRequestError, match=words):
        preparation().prepare(Ask(chat, SamplingParams()))
    assert rendered == []


@pytest.mark.parametrize("prompt", ["Hello", Chat((Message("user", "Hello"),))])
def test_a_grammar_is_its_tenants_own(prompt: Prompt) -> None:
    sampling = SamplingParams(grammar=Grammar("json_schema", "{}"))
    prepared = preparation().prepare(Ask(prompt, sampling, tenant="a"))
    assert prepared.sampling.grammar == Grammar("json_schema", "{}", tenant="a")


@pytest.mark.parametrize("opens", [True, False])
@pytest.mark.parametrize("tokens", [None, 0, 3])
def test_a_thinking_budget_needs_marks_and_0_closes_what_the_prompt_opens(
    opens: bool, tokens: int | None
) -> None:
    chat = Chat((Message("user", "Why?"),), template_options={"open": opens})
    ask = Ask(chat, SamplingParams(), thinking_tokens=tokens)
    assert preparation().prepare(ask).sampling.thinking is None
    prepared = preparation(Marks("<t>", "</t>")).prepare(ask)
    end = tuple(ByteTokenizer().encode("</t>", add_special_tokens=False))
    assert (prepared.tokens[-len(end) :] == end) == (opens and tokens == 0)
    assert prepared.closes_thought == (opens and tokens == 0)
    assert prepared.opens_thought == (opens and tokens != 0)
    assert prepared.sampling.thinking == (
        None
        if tokens is None
        else ThinkingBudget(tokens, "<t>", "</t>", end, prepared.opens_thought)
    )


@pytest.mark.parametrize(("tools", "expected"), [(True, CALL_MARKS), (False, Marks("", ""))])
def test_a_thinking_budget_knows_the_marks_of_calls_that_may_be_made(
    tools: bool, expected: Marks
) -> None:
    chat = Chat((Message("user", "Why?"),), (Tool("look"),) if tools else ())
    prepared = preparation(Marks("<t>", "</t>")).prepare(
        Ask(chat, SamplingParams(), thinking_tokens=3)
    )
    budget = prepared.sampling.thinking
    assert budget is not None
    assert Marks(budget.call_start, budget.call_end) == expected


def test_of_a_request_that_is_not_kept_and_of_a_count_nothing_is_remembered() -> None:
    of = preparation()
    ask = Ask(Chat((Message("user", "Hi"),), (Tool("look"),)), SamplingParams(), keep=False)
    assert of.prepare(ask).replayed is None
    of.tokens(ask.prompt)
    assert of._replay._spellings._tools.weight == 0
    assert of.prepare(replace(ask, keep=True)).replayed is not None
    assert of._replay._spellings._tools.weight > 0


@pytest.mark.parametrize("opens", [True, False])
def test_stop_strings_are_not_searched_in_reasoning(opens: bool) -> None:
    chat = Chat((Message("user", "Why?"),), template_options={"open": opens})
    ask = Ask(chat, SamplingParams(stop=("x",)))
    assert preparation().prepare(ask).sampling.thoughts is None
    marked = preparation(Marks("<t>", "</t>"))
    assert marked.prepare(ask).sampling.thoughts == Thoughts("<t>", "</t>", opens)
    closed = marked.prepare(replace(ask, thinking_tokens=0))
    assert closed.sampling.thoughts == Thoughts("<t>", "</t>", opened=False)
    assert marked.prepare(replace(ask, sampling=SamplingParams())).sampling.thoughts is None


def test_the_results_of_calls_are_rendered_in_the_order_of_the_calls() -> None:
    calls = tuple(ToolCall(name, "look", "{}") for name in "ab")
    asked = (Message("user", "?"), Message("assistant", tool_calls=calls))
    results = [Message("tool", name, tool_call_id=name) for name in "ab"]
    of = preparation()
    given, other = (
        Ask(Chat((*asked, *order)), SamplingParams()) for order in (results, results[::-1])
    )
    assert of.prepare(given).tokens == of.prepare(other).tokens
    assert of.tokens(given.prompt) == of.tokens(other.prompt)


PICTURE, OTHER = (Attachment(f"image {name}", name.encode()) for name in "ab")


def with_pictures(*pictures: Attachment, after: tuple[Message, ...] = ()) -> Chat:
    return Chat((Message("user", "See", attachments=pictures), *after))


@pytest.mark.parametrize(
    ("policy", "refused"),
    [
        ("note", [False, False, False]),
        ("reject-once", [True, False, False]),
        ("reject", [True, True, False]),
    ],
)
def test_a_user_is_told_of_a_picture_as_often_as_the_policy_says(
    policy: ImageInput, refused: list[bool]
) -> None:
    of = Attachments(policy)
    chat = with_pictures(PICTURE)
    answered = with_pictures(PICTURE, after=(Message("assistant", "I cannot."),))
    said = "cannot read image a: this model reads text only"
    for one, is_refused in zip((chat, chat, answered), refused, strict=True):
        with pytest.raises(InvalidRequestError, match=said) if is_refused else nullcontext():
            of.check(one.fresh, "tenant")


def test_each_tenant_is_told_and_of_all_pictures_at_once() -> None:
    of = Attachments("reject-once")
    both = with_pictures(PICTURE, OTHER).fresh
    for tenant in ("one", "two"):
        with pytest.raises(InvalidRequestError, match="image a"):
            of.check(both, tenant)
        of.check(both, tenant)
        of.check((OTHER,), tenant)


def test_what_a_tool_returned_is_never_refused() -> None:
    result = Message("tool", "see", tool_call_id="c", attachments=(PICTURE,))
    call = Message("assistant", tool_calls=(ToolCall("c", "look", "{}"),))
    asked = (Message("user", "?"), call, result)
    ask = Ask(Chat((*asked, Message("user", "And?"))), SamplingParams())
    preparation().prepare(ask)
    fresh = replace(ask, prompt=Chat((*asked, Message("user", "!", attachments=(OTHER,)))))
    with pytest.raises(InvalidRequestError, match="image b"):
        preparation().prepare(fresh)


@pytest.mark.parametrize(
    ("prompt", "short"),
    [
        ("a" * 65_536, True),
        ("a" * 65_537, False),
        (tuple(range(100_000)), True),
        (Chat((Message("user", "a" * 60_000),)), True),
        (Chat((Message("user", "a"),) * 300), False),
        (Chat((Message("user", "a"),), (Tool("go"),) * 300), False),
    ],
    ids=["text", "long text", "tokens", "message", "messages", "tools"],
)
def test_short_work_has_few_characters_and_few_parts(prompt: Prompt, short: bool) -> None:
    assert _is_short(prompt) is short
