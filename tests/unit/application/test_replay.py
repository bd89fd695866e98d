"""A known conversation goes on in its own tokens; any other is rendered."""

from __future__ import annotations

import gc
from dataclasses import replace

import pytest

from semantic.application.chat.replay import Replay
from semantic.application.chat.turn_cache import TurnCache
from semantic.domain.chat import Chat, Message, Tool, Turn, thought_digest
from semantic.domain.request_parts import Answered
from semantic.ports.chat import RenderedChat
from tests.support.fake_chat_format import FakeChatFormat
from tests.support.fake_tokenizer import EOS, ByteTokenizer
from tests.support.file_memory import traced

TOKENIZER = ByteTokenizer()


def written(text: str, *, end: bool = True) -> tuple[int, ...]:
    """What the model wrote."""
    return (*TOKENIZER.encode(text, add_special_tokens=False), *([EOS] if end else []))


class Conversation:
    """A client, and a model that is played by hand."""

    def __init__(self, replay: Replay | None = None, tenant: str = "") -> None:
        self.format = FakeChatFormat()
        self.turns = TurnCache(1 << 20)
        self.replay = replay or Replay(self.format, self.turns, b"model", frozenset({EOS}))
        self.tenant = tenant
        self.chat = Chat((Message("user", "Hello"),))

    def prompt(self) -> tuple[int, ...]:
        return self.replay.render(self.chat, self.tenant).rendered.tokens

    def answer(self, said: Message, generated: tuple[int, ...]) -> tuple[int, ...]:
        """The model writes `generated`, which is read as `said`; all tokens."""
        replayed = self.replay.render(self.chat, self.tenant)
        prompt = replayed.rendered.tokens
        self.replay.record(replayed, prompt, said, generated)
        self.say(replace(said, reasoning=""))
        return (*prompt, *generated)

    def say(self, *messages: Message) -> None:
        self.chat = replace(self.chat, messages=(*self.chat.messages, *messages))


def test_what_the_model_wrote_stands_as_it_was() -> None:
    talk = Conversation()
    first = talk.answer(Message("assistant", "Hi!", "Hm."), written("<think>Hm.</think> Hi!"))
    talk.say(Message("user", "Bye"))
    prompt = talk.prompt()
    assert prompt[: len(first) - 1] == first[:-1]
    assert TOKENIZER.decode(prompt[len(first) - 1 :]) == "\n<user>Bye\n<assistant>"
    second = talk.answer(Message("assistant", "Ciao"), written("  Ciao"))
    talk.say(Message("user", "One more"))
    assert talk.prompt()[: len(second) - 1] == second[:-1]
    assert talk.prompt() != talk.format.render(talk.chat).tokens


def test_an_answer_without_its_end_gets_the_templates() -> None:
    talk = Conversation()
    first = talk.answer(Message("assistant", "Hi the"), written("Hi the", end=False))
    talk.say(Message("user", "Go on"))
    prompt = talk.prompt()
    assert prompt[: len(first)] == first
    assert TOKENIZER.decode(prompt[len(first) :]) == "\n<user>Go on\n<assistant>"


def test_an_unknown_history_is_rendered() -> None:
    talk = Conversation()
    talk.answer(Message("assistant", "Hi!"), written(" Hi !"))
    talk.chat = Chat((Message("user", "Hello"), Message("assistant", "No!"), Message("user", "x")))
    assert talk.prompt() == talk.format.render(talk.chat).tokens


@pytest.mark.parametrize("number", [1, 3])
def test_an_edited_answer_is_rendered_and_what_was_before_it_is_not(number: int) -> None:
    talk = Conversation()
    known = talk.answer(Message("assistant", "a"), written("  a"))
    talk.say(Message("user", "x"))
    later = talk.answer(Message("assistant", "b"), written("  b"))
    talk.say(Message("user", "y"))
    messages = list(talk.chat.messages)
    messages[number] = Message("assistant", "edited")
    talk.chat = replace(talk.chat, messages=tuple(messages))
    prompt = talk.prompt()
    assert prompt[: len(later)] != later
    if number == 3:
        assert prompt[: len(known) - 1] == known[:-1]
    else:
        assert prompt == talk.format.render(talk.chat).tokens


def test_other_tools_make_another_conversation() -> None:
    talk = Conversation()
    talk.answer(Message("assistant", "Hi!"), written("  Hi!"))
    talk.say(Message("user", "Bye"))
    talk.chat = replace(talk.chat, tools=(Tool("t"),))
    assert talk.prompt() == talk.format.render(talk.chat).tokens


class Recorded(TurnCache):
    """Turns, with the owners that they were recorded under."""

    def __init__(self) -> None:
        super().__init__(1 << 20)
        self.owners: list[bytes] = []

    def put(self, turn: Turn) -> None:
        self.owners.append(turn.owner)
        super().put(turn)


def test_turns_are_counted_under_their_tenant_whatever_the_model() -> None:
    turns = Recorded()
    for model, tenant in ((b"m", "a"), (b"n", "a"), (b"m", "b")):
        talk = Conversation(Replay(FakeChatFormat(), turns, model, frozenset({EOS})), tenant)
        talk.answer(Message("assistant", "Hi!"), written("Hi!"))
    one, another, other = turns.owners
    assert one == another != other
    talk.replay.record_cut(talk.replay.render(talk.chat, "a"), Message("assistant", "cut"))
    assert turns.owners[3] == one


def test_a_tenant_knows_only_its_own_turns() -> None:
    talk = Conversation()
    talk.answer(Message("assistant", "Hi!"), written("  Hi!"))
    talk.say(Message("user", "Bye"))
    other = Conversation(talk.replay, tenant="other")
    other.chat = talk.chat
    assert other.prompt() == talk.format.render(talk.chat).tokens != talk.prompt()


def test_a_template_that_cannot_go_on_renders_everything() -> None:
    class Whole(FakeChatFormat):
        def render_after(self, chat: Chat, n_messages: int) -> None:
            del chat, n_messages

    talk = Conversation(Replay(Whole(), TurnCache(1 << 20), b"model", frozenset({EOS})))
    talk.answer(Message("assistant", "Hi!"), written("  Hi!"))
    talk.say(Message("user", "Bye"))
    assert talk.prompt() == talk.format.render(talk.chat).tokens


@pytest.mark.parametrize("is_owner", [True, False])
def test_turns_are_closed_by_their_owner(is_owner: bool) -> None:
    turns = TurnCache(1 << 20)
    Replay(FakeChatFormat(), turns, b"model", frozenset({EOS}), is_owner=is_owner).close()
    assert turns._writer._is_closed is is_owner


def test_a_turn_whose_parent_was_forgotten_is_not_known() -> None:
    talk = Conversation()
    for text in "abc":
        talk.answer(Message("assistant", text), written(f"  {text}"))
        talk.say(Message("user", "x"))
    kept, lost = TurnCache(1 << 20), []
    for point in list(talk.turns._turns._tenants[""]):
        turn = talk.turns.get(point)
        assert turn is not None
        lost.append(turn) if turn.parent is None else kept.put(turn)
    assert len(lost) == 1
    again = Conversation(Replay(talk.format, kept, b"model", frozenset({EOS})))
    again.chat = talk.chat
    assert again.prompt() == talk.format.render(talk.chat).tokens


def test_what_went_on_from_other_tokens_does_not_go_on_from_these() -> None:
    """The same answer is given once more, after another thought."""
    talk = Conversation()
    talk.answer(Message("assistant", "Done.", "Hm."), written("<think>Hm.</think>Done."))
    talk.say(Message("user", "next"))
    talk.answer(Message("assistant", "ok"), written("  ok"))
    talk.say(Message("user", "more"))
    again = Conversation(talk.replay)
    thought = "Well, this is another thought, and a longer one."
    second = again.answer(
        Message("assistant", "Done.", thought), written(f"<think>{thought}</think>Done.")
    )
    prompt = talk.prompt()
    assert prompt[: len(second) - 1] == second[:-1]
    rest = "\n<user>next\n<assistant>ok\n<user>more\n<assistant>"
    assert TOKENIZER.decode(prompt[len(second) - 1 :]) == rest


def test_the_same_answer_in_tokens_of_the_same_number_is_another() -> None:
    talk = Conversation()
    talk.answer(Message("assistant", "Done.", "yes"), written("<think>yes</think>Done."))
    talk.say(Message("user", "next"))
    talk.answer(Message("assistant", "ok"), written("  ok"))
    again = Conversation(talk.replay)
    again.answer(Message("assistant", "Done.", "no!"), written("<think>no!</think>Done."))
    talk.say(Message("user", "more"))
    known = talk.replay.render(talk.chat, "")
    assert known.n_replayed == 2
    assert "  ok" not in TOKENIZER.decode(known.rendered.tokens)


def test_an_answer_that_was_cut_is_known_and_not_gone_on_from() -> None:
    talk = Conversation()
    replayed = talk.replay.render(talk.chat, "")
    talk.replay.record_cut(replayed, Message("assistant", "Hi"))
    talk.say(Message("assistant", "Hi"), Message("user", "Bye"))
    known = talk.replay.render(talk.chat, "")
    assert known.rendered.tokens == talk.format.render(talk.chat).tokens
    assert (known.n_replayed, known.answers) == (0, {1: Answered.CUT})

    whole = Conversation(talk.replay)
    whole.answer(Message("assistant", "Hi"), written("  Hi"))
    talk.replay.record_cut(replayed, Message("assistant", "Hi"))
    assert talk.replay.render(talk.chat, "").n_replayed == 2, "what can be gone on from stays"


def test_tools_are_rendered_as_they_were_written_first() -> None:
    class Keys(FakeChatFormat):
        """Writes what a tool takes, in the order in which it comes."""

        def render(self, chat: Chat) -> RenderedChat:
            keys = [key for tool in chat.tools for key in tool.parameters]
            rendered = super().render(chat)
            return replace(rendered, tokens=(*map(ord, "".join(keys)), *rendered.tokens))

    replay = Replay(Keys(), TurnCache(1 << 20), b"model", frozenset({EOS}))
    hello = (Message("user", "Hello"),)
    one, two = (Tool("t", "", dict.fromkeys(keys, 1)) for keys in ("ab", "ba"))
    first = replay.render(Chat(hello, (one,)), "").rendered.tokens
    assert replay.render(Chat(hello, (two,)), "").rendered.tokens == first
    others = replay.render(Chat(hello, (two,)), "other").rendered.tokens
    assert others != first, "no tenant's spelling is seen by another"
    assert replay.render(Chat(hello, (one, two)), "").rendered.tokens != first


def test_what_is_known_of_answers_is_told() -> None:
    talk = Conversation()
    talk.answer(Message("assistant", "a", "Hm."), written("<think>Hm.</think> a"))
    talk.say(Message("user", "x"))
    talk.answer(Message("assistant", "b"), written("  b"))
    talk.say(Message("user", "y"))
    known = talk.replay.render(talk.chat, "")
    assert (known.n_replayed, known.answers) == (4, {})

    talk.say(Message("assistant", "never said"), Message("user", "z"))
    more = talk.replay.render(talk.chat, "")
    assert (more.n_replayed, more.answers) == (4, {5: Answered.OTHER})
    contradicted = replace(talk.chat.messages[1], reasoning="I never thought that.")
    messages = (talk.chat.messages[0], contradicted, *talk.chat.messages[2:])
    whole = talk.replay.render(replace(talk.chat, messages=messages), "")
    assert whole.n_replayed == 0
    assert whole.answers == {1: Answered.RETHOUGHT, 3: Answered.PLAIN, 5: Answered.OTHER}
    strange = talk.replay.render(talk.chat, "other")
    assert set(strange.answers.values()) == {Answered.OTHER}


def turn(number: int, n_tokens: int = 10) -> Turn:
    tokens = tuple(range(n_tokens))
    return Turn(number.to_bytes(32, "big"), None, 0, tokens, thought_digest(""))


def test_turns_in_memory_stay_inside_their_budget_and_the_last_used_stay() -> None:
    turns = TurnCache(10_000)
    for number in range(100):
        turns.put(turn(number))
        assert turns.get(turn(0).point) == turn(0)
        assert turns._turns.weight <= 10_000
    assert turns.get(turn(1).point) is None
    assert turns.get(turn(99).point) == turn(99)
    turns.put(turn(99))
    turns.put(turn(1000, 10_000))
    assert turns._turns.weight <= 10_000
    assert turns.get(turn(1000).point) is None


def test_turns_in_memory_take_no_more_than_they_are_counted_for() -> None:
    turns = TurnCache(1 << 24)
    with traced(__file__) as taken:
        for number in range(300):
            turns.put(turn(number, 1000))
        gc.collect()
        assert turns._turns.weight / 10 < taken() <= turns._turns.weight
