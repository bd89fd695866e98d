"""Agents move between replicas that share an object store: same tokens, and hardly any computed.

The replicas are engines on tiny models with stores of their own and one folder as their bucket;
`make test-fleet` has a real S3 server and processes.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Iterable, Iterator
from concurrent.futures import Future, wait
from contextlib import aclosing, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from semantic.adapters.stores import write_queue
from semantic.adapters.stores.conversations import DiskTurns
from semantic.adapters.stores.write_queue import Backoff
from semantic.application.serving import Serving
from semantic.composition.engine_settings import Settings
from semantic.composition.process_stores import open_responses
from semantic.domain.answer import AnswerEnd, AnswerEvent, AnswerStarted, ReasoningDelta, TextDelta
from semantic.domain.chat import Chat, Message, Turn
from semantic.domain.errors import OverloadedError
from semantic.domain.responses import StoredResponse
from semantic.domain.stored import Tier
from semantic.domain.value_objects import SamplingParams
from semantic.ports.serving import Ask
from semantic.ports.store import MOST_WAIT, DiskResponsesPort
from semantic.serve import ServeSettings, load_serving
from semantic_fleet.objects import remote_records
from semantic_fleet.objects.objects import Objects
from semantic_fleet.objects.remote_records import Records
from semantic_server.http.activity import Ending
from semantic_server.http.answer_records import InstrumentedServing
from tests.support.durable import Durable, history, text
from tests.support.fake_clock import FakeClock
from tests.support.held_turns import PATIENCE
from tests.support.lanes import more
from tests.support.model_folder import small_model

KINDS = ("llama", "gemma3", "lfm2", *more("recurrent_gemma", "gpt_oss", "falcon_h1", "windows"))


class Fleet:
    """A bucket and a secret; replicas come and go."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.bucket = folder / "bucket"
        self.bucket.mkdir()
        self.secret = self.new_secret("secret")

    def new_secret(self, name: str) -> Path:
        path = self.folder / name
        path.write_bytes(name.encode() + bytes(range(64)))
        path.chmod(0o600)
        return path

    @contextmanager
    def replica(
        self, name: str, architecture: str = "llama", secret: Path | None = None
    ) -> Iterator[Durable]:
        """One life of a replica with a store of its own."""
        known = self.bucket.as_uri(), secret or self.secret
        life = Durable(architecture, self.folder / name, fleet=known)
        try:
            yield life
        finally:
            life.close()

    def objects(self, part: str = "") -> list[Path]:
        return sorted(
            one for one in self.bucket.rglob("*") if one.is_file() and part in one.as_posix()
        )


@pytest.fixture
def fleet(tmp_path: Path) -> Fleet:
    return Fleet(tmp_path)


def test_what_was_not_uploaded_is_uploaded_at_the_end_of_a_later_turn(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else nothing that follows it would be found."""
    prompt = text(700, seed=1)
    with fleet.replica("a") as one:
        with monkeypatch.context() as failing:
            failing.setattr(Backoff, "is_on", lambda _: True)
            past = history(prompt, one.ask("ann", prompt, 3))
            assert one.store.holds_back
        assert not fleet.objects(".full")
        assert not one.store.holds_back
        onward = (*past, *text(300, seed=2))
        past = history(onward, one.ask("ann", onward, 3))
    with fleet.replica("b") as other:
        assert other.ask("ann", (*past, 1), 3).cached_tokens >= 0.95 * len(past)


@pytest.mark.parametrize("architecture", KINDS)
def test_an_agent_goes_on_at_another_replica(architecture: str, fleet: Fleet) -> None:
    prompt = text(600, seed=1)
    with fleet.replica("a", architecture) as life:
        past = history(prompt, life.ask("ann", prompt, 9))
    with fleet.replica("b", architecture) as other:
        moved = other.ask("ann", (*past, *text(9, seed=2)), 9)
        assert moved.match is not None
        assert (moved.cached_tokens, moved.match.source) == (len(past), "remote")
        assert other.manifest("ann").generation == 2
        assert other.manifest("ann").turns == 2
        past = history((*past, *text(9, seed=2)), moved)
        again = other.ask("ann", (*past, 1), 3)  # from its own pool: the bucket is not asked
        assert again.match is not None
        assert again.match.source == "pool"
    with fleet.replica("a", architecture) as back:
        home = back.ask("ann", (*past, *text(5, seed=3)), 9)
        # Less than a block is not asked for.
        assert len(past) - 20 <= home.cached_tokens <= len(past)


def test_a_replica_without_a_store_of_that_agent_shares_its_prefix(fleet: Fleet) -> None:
    """By content: another agent of the tenant, and no block of another tenant's or model's."""
    prompt = text(700, seed=1)
    with fleet.replica("a") as life:
        life.ask("ann", prompt, 5)
    with fleet.replica("b") as other:
        assert other.ask("bob", (*prompt[:600], *text(9, seed=2)), 5).cached_tokens == 600
        assert other.ask("cat", prompt, 5, tenant="another").cached_tokens == 0
    with fleet.replica("c", "qwen2") as model:
        assert model.ask("ann", prompt, 5).cached_tokens == 0


def test_another_secret_finds_nothing_and_harms_nothing(fleet: Fleet) -> None:
    """Rotation: the replicas with the new secret compute, those with the old one still read."""
    prompt = text(600, seed=1)
    with fleet.replica("a") as life:
        life.ask("ann", prompt, 5)
    before = {one: one.read_bytes() for one in fleet.objects()}
    with fleet.replica("b", secret=fleet.new_secret("new")) as rotated:
        assert rotated.ask("ann", prompt, 5).cached_tokens == 0
    assert len(fleet.objects()) > len(before)
    assert {one: one.read_bytes() for one in before} == before
    with fleet.replica("c") as old:
        assert old.ask("bob", prompt, 5).cached_tokens == 599


@pytest.mark.parametrize(
    ("architecture", "damage"),
    [
        pytest.param(architecture, damage, marks=[] if usual else [pytest.mark.thorough])
        for i, damage in enumerate(("flipped", "truncated", "empty", "gone", "swapped"))
        for architecture, usual in (("llama", i % 2 == 0), ("lfm2", i % 2 == 1))
    ],
)
def test_damaged_objects_are_computed_again(architecture: str, damage: str, fleet: Fleet) -> None:
    """The answer is the same; what was read in vain is replaced, and read by later replicas."""
    prompt = text(600, seed=1)
    with fleet.replica("a", architecture) as life:
        past = history(prompt, life.ask("ann", prompt, 5))
    bodies = fleet.objects(".full")
    for one, other in zip(bodies, bodies[1:] + bodies[:1], strict=True):
        data = one.read_bytes()
        if damage == "gone":
            one.unlink()
        elif damage == "swapped" and "after" not in one.parts:
            one.write_bytes(other.read_bytes() if other.stat().st_size == len(data) else data[1:])
        else:
            middle = len(data) // 2
            flipped = bytes([*data[:middle], data[middle] ^ 1, *data[middle + 1 :]])
            one.write_bytes({"flipped": flipped, "truncated": data[:-7]}.get(damage, b""))
    cached = []
    for number, name in enumerate("bcd"):
        with fleet.replica(name, architecture) as life:
            cached.append(life.ask(name, (*past, *range(number)), 5).cached_tokens)
    assert cached[0] < 256
    assert cached[-1] >= 512


def test_an_object_store_that_cannot_be_written_costs_no_answer(fleet: Fleet) -> None:
    with fleet.replica("a") as life:
        fleet.bucket.rename(fleet.folder / "elsewhere")
        fleet.bucket.write_text("no folder")
        prompt = text(600, seed=1)
        past = history(prompt, life.ask("ann", prompt, 5))
        assert life.ask("ann", past, 5).cached_tokens == len(past) - 1
        life.store.flush()
        assert life.counts(Tier.REMOTE)["write_errors"] > 0


def test_two_replicas_that_save_one_agent_at_once_lose_no_generation(fleet: Fleet) -> None:
    prompt = text(300, seed=1)
    with fleet.replica("a") as one, fleet.replica("b") as other:
        for life in (one, other, one, other):
            life.ask("ann", prompt, 3)
            life.store.flush()
        assert len(fleet.objects("agents")) == 1
    with fleet.replica("c") as third:
        third.ask("ann", prompt, 3)
        assert third.manifest("ann").generation == 5


# With everything in front of it


def settings(fleet: Fleet, name: str, **more_settings: object) -> ServeSettings:
    (fleet.folder / name / "store").mkdir(parents=True, exist_ok=True)
    engine = Settings(
        str(small_model(fleet.folder / "model")),
        pool_blocks=400,
        use_disk=True,
        store=fleet.folder / name / "store",
        disk_bytes=1 << 28,
        remote=fleet.bucket.as_uri(),
        fleet_secret=fleet.secret,
    )
    return ServeSettings(replace(engine, **more_settings))  # type: ignore[arg-type]


async def said(serving: Serving, chat: Chat) -> tuple[str, AnswerEnd, int]:
    """The answer, its end, and the tokens of its prompt."""
    answer, end, n_prompt = "", None, 0
    async for event in serving.answer(Ask(chat, SamplingParams(), 12, "ann")):
        if isinstance(event, TextDelta):
            answer += event.text
        elif isinstance(event, AnswerStarted):
            n_prompt = event.prompt_tokens
        elif isinstance(event, AnswerEnd):
            end = event
    assert end is not None
    return answer, end, n_prompt


@pytest.mark.process
def test_a_conversation_goes_on_at_another_server_in_the_tokens_of_the_first(fleet: Fleet) -> None:
    """Its turns move too: the history is not rendered again."""
    rules = " ".join(f"Rule {i} is that {i} plus {i} is {2 * i}." for i in range(1, 60))
    first = Chat((Message("system", rules), Message("user", "What is 3 + 4?")))

    async def run() -> None:
        one = await load_serving(settings(fleet, "one"))
        answer, _, _ = await said(one, first)
        await one.close()
        other = await load_serving(settings(fleet, "two", any_chip=False))
        onward = Chat((*first.messages, Message("assistant", answer), Message("user", "And 5?")))
        _, end, n_prompt = await said(other, onward)
        assert end.usage.match is not None
        assert end.usage.match.source == "remote"
        assert end.usage.cached > 0.95 * (n_prompt - 10)
        assert not end.usage.match.any_chip
        await other.close()
        assert len(fleet.objects("turns/")) == 2

    asyncio.run(run())


@pytest.mark.process
def test_an_answer_that_a_stop_ends_goes_on_at_another_server(fleet: Fleet) -> None:
    """The same request again, and the conversation with what of the answer had come."""
    rules = " ".join(f"Rule {i} is that {i} plus {i} is {2 * i}." for i in range(1, 60))
    chat = Chat((Message("system", rules), Message("user", "Tell all rules.")))

    async def run() -> None:
        one, ending = await load_serving(settings(fleet, "one")), Ending()
        ask = Ask(chat, SamplingParams(ignore_eos=True), 500, "ann")
        begun = ""

        async def begin() -> None:
            nonlocal begun
            async for event in InstrumentedServing(one, [], through=ending.events).answer(ask):
                if isinstance(event, ReasoningDelta):
                    begun += event.text
                    ending.begin()

        with pytest.raises(OverloadedError, match="stopping"):
            await begin()
        await one.close()
        other = await load_serving(settings(fleet, "two"))
        onward = (*chat.messages, Message("assistant", "", begun), Message("user", "And then?"))
        for again in (chat, Chat(onward)):
            _, end, n_prompt = await said(other, again)
            assert end.usage.cached > 0.95 * (n_prompt - 10)
        await other.close()

    asyncio.run(run())


@pytest.mark.process
def test_a_request_waits_once_for_a_store_that_hangs(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its response, its history and its blocks are behind one circuit breaker."""
    monkeypatch.setattr(write_queue, "FIRST_PAUSE", 1e6)  # however slow this machine is
    waited, attempt, hangs = list[bool](), Objects._attempt, False

    @contextmanager
    def waiting(objects: Objects, what: str = "", *, writes: bool = False) -> Iterator[None]:
        with attempt(objects, what, writes=writes):
            if hangs:
                waited.append(writes)
                raise TimeoutError("operation timed out")
            yield

    monkeypatch.setattr(Objects, "_attempt", waiting)
    rules = " ".join(f"Rule {i} is that {i} plus {i} is {2 * i}." for i in range(1, 40))
    first = Chat((Message("system", rules), Message("user", "What is 3 + 4?")))
    response = StoredResponse("resp_1", "ann", (), (), "{}", None, (), 1)

    async def run() -> None:
        nonlocal hangs
        one, responses = await served("one")
        text, _, _ = await said(one, first)
        onward = Chat((*first.messages, Message("assistant", text), Message("user", "And 5?")))
        expected, _, _ = await said(one, onward)
        responses.put("", response)
        await one.close()
        responses.close()
        hangs = True
        other, responses = await served("two")
        assert responses.get("", "resp_1") is None
        answer, end, _ = await said(other, onward)
        responses.put("", response)
        assert (answer, end.usage.cached) == (expected, 0)
        assert waited == [False]
        assert responses.get("", "resp_1") == response  # of this machine
        await other.close()
        responses.close()

    async def served(name: str) -> tuple[Serving, DiskResponsesPort]:
        here = settings(fleet, name)
        return await load_serving(here), open_responses(here.engine, pytest.fail)

    asyncio.run(run())


class VirtualLoop(asyncio.SelectorEventLoop):
    """A loop whose time passes only by `clock`: what waits for it waits until then."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = FakeClock()

    def time(self) -> float:
        return self.clock()


class HeldUploads:
    """Writes of turns that wait until they are let."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.begun, self.go = threading.Semaphore(0), threading.Event()
        put = Records.put

        def held(
            records: Records, tag: bytes, key: bytes, data: bytes, *, replaces: bool = True
        ) -> None:
            self.begun.release()
            assert self.go.wait(PATIENCE)
            put(records, tag, key, data, replaces=replaces)

        monkeypatch.setattr(Records, "put", held)

    async def wait(self) -> None:
        """Return when one more has begun, and all that can happen here has."""
        loop = asyncio.get_running_loop()
        assert await loop.run_in_executor(None, partial(self.begun.acquire, timeout=PATIENCE))
        await quiet()


async def quiet() -> None:
    """Let the loop do what it can do now."""
    for _ in range(50):
        await asyncio.sleep(0)


def is_over(events: list[AnswerEvent]) -> bool:
    """Whether the client knows that its answer has ended; it has all of its text."""
    assert any(isinstance(one, ReasoningDelta | TextDelta) for one in events)
    return isinstance(events[-1], AnswerEnd)


def on_a_clock(test: Callable[[FakeClock], Coroutine[None, None, None]]) -> None:
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        loop = runner.get_loop()
        assert isinstance(loop, VirtualLoop)
        runner.run(test(loop.clock))


TOLD = Chat((Message("user", "Tell all rules."),))
OTHER = Chat((Message("user", "Tell one rule."),))
PLAIN = Ask(TOLD, SamplingParams(ignore_eos=True), 12, "ann")


def begun_answer(serving: Serving, ask: Ask) -> tuple[list[AnswerEvent], asyncio.Task[None]]:
    """The events of an answer as they come."""
    events: list[AnswerEvent] = []

    async def read() -> None:
        async with aclosing(serving.answer(ask)) as answer:
            async for event in answer:
                events.append(event)  # noqa: PERF401  they are looked at on the way

    return events, asyncio.ensure_future(read())


@pytest.mark.process
def test_an_answer_ends_when_another_server_finds_its_turn(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = HeldUploads(monkeypatch)

    async def run(clock: FakeClock) -> None:
        one = await load_serving(settings(fleet, "one"))
        events, reading = begun_answer(one, PLAIN)
        await held.wait()
        assert not is_over(events)
        clock.advance(MOST_WAIT - 0.01)
        await quiet()
        assert not is_over(events)
        held.go.set()
        await reading
        assert is_over(events)
        assert len(fleet.objects("turns/")) == 1
        await one.close()

    on_a_clock(run)


@pytest.mark.process
def test_an_answer_does_not_wait_long_for_an_upload_that_hangs(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor does the loop: another answer is read meanwhile, and what is late is still uploaded."""
    held = HeldUploads(monkeypatch)

    async def run(clock: FakeClock) -> None:
        one = await load_serving(settings(fleet, "one"))
        events, reading = begun_answer(one, PLAIN)
        await held.wait()
        more, also_reading = begun_answer(one, replace(PLAIN, prompt=OTHER, agent="ben"))
        await held.wait()
        assert not is_over(events)
        assert not is_over(more)
        clock.advance(MOST_WAIT)
        await asyncio.gather(reading, also_reading)
        assert is_over(events)
        assert fleet.objects("turns/") == []
        held.go.set()
        await one.close()
        assert len(fleet.objects("turns/")) == 2

    on_a_clock(run)


@pytest.mark.process
def test_a_client_that_leaves_at_the_end_leaves_nothing_behind(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = HeldUploads(monkeypatch)

    async def run(_: FakeClock) -> None:
        one = await load_serving(settings(fleet, "one"))
        before = asyncio.all_tasks()
        events, reading = begun_answer(one, PLAIN)
        await held.wait()
        reading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reading
        assert not is_over(events)
        assert asyncio.all_tasks() == before
        held.go.set()
        await one.close()
        assert len(fleet.objects("turns/")) == 1  # it has the answer, and may go on elsewhere

    on_a_clock(run)


@pytest.mark.process
@pytest.mark.parametrize(
    "ask",
    [replace(PLAIN, keep=False), replace(PLAIN, prompt="Tell all rules.")],
    ids=["not kept", "no chat"],
)
def test_what_is_not_recorded_is_not_waited_for(
    ask: Ask, fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = HeldUploads(monkeypatch)

    async def run(_: FakeClock) -> None:
        one = await load_serving(settings(fleet, "one"))
        events, reading = begun_answer(one, ask)
        await reading
        assert is_over(events)
        held.go.set()
        await one.close()
        assert fleet.objects("turns/") == []

    on_a_clock(run)


@pytest.mark.process
def test_an_answer_that_was_cut_waits_too_and_none_while_the_store_has_failed(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def run(_: FakeClock) -> None:
        one = await load_serving(settings(fleet, "one"))
        events, reading = begun_answer(one, replace(PLAIN, keep=False))
        await reading
        text = "".join(event.text for event in events if isinstance(event, ReasoningDelta))
        held = HeldUploads(monkeypatch)
        cut = replace(PLAIN, sampling=SamplingParams(ignore_eos=True, stop=(text[-6:-2],)))
        events, reading = begun_answer(one, cut)
        await held.wait()
        assert not is_over(events)
        held.go.set()
        await reading
        held.go.clear()
        monkeypatch.setattr(Objects, "has_failed", True)
        for ask in (cut, replace(PLAIN, prompt=OTHER)):
            events, reading = begun_answer(one, ask)
            await reading
            assert is_over(events)
        held.go.set()
        await one.close()
        assert len(fleet.objects("turns/")) == 2

    on_a_clock(run)


def test_a_stored_response_is_waited_for_as_a_turn_is(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until it is there, or is late, or not at all after a failure; it is not back once deleted."""
    held, waited = HeldUploads(monkeypatch), list[float | None]()

    def waiting(futures: Iterable[Future[None]], seconds: float | None = None) -> None:
        waited.append(seconds)
        if seconds is None:
            held.go.set()
            wait(futures)

    monkeypatch.setattr(remote_records, "wait", waiting)
    here, there = (
        open_responses(settings(fleet, name).engine, pytest.fail) for name in ("one", "two")
    )
    stored = StoredResponse("resp_1", "ann", (), (), "{}", None, (), 1)
    here.put("", stored)
    assert waited == [MOST_WAIT]
    assert here.get("", "resp_1") == stored
    assert there.get("", "resp_1") is None
    here.delete("", "resp_1")
    assert waited == [MOST_WAIT, None]
    assert there.get("", "resp_1") is None
    monkeypatch.setattr(Objects, "has_failed", True)
    here.put("", stored)
    assert len(waited) == 2
    monkeypatch.setattr(remote_records, "wait", wait)
    here.close()
    assert there.get("", "resp_1") == stored
    there.close()


@pytest.mark.process
def test_servers_that_answer_in_turns_give_the_tokens_of_one(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However slow their disks are: no turn reaches those before the last answer."""
    may_write = threading.Event()
    on_disk = DiskTurns.put

    def slow(turns: DiskTurns, turn: Turn) -> None:
        assert may_write.wait(PATIENCE)
        on_disk(turns, turn)

    chat = Chat((Message("user", "What is 3 + 4?"),))

    async def conversation(*servers: Serving) -> list[tuple[int, ...]]:
        """The tokens of each prompt, which have those of the answers before."""
        nonlocal chat
        chat, prompts = Chat(chat.messages[:1]), list[tuple[int, ...]]()
        for number in range(5):
            server = servers[number % len(servers)]
            prompts.append(await server.tokenize(chat))
            text, _, _ = await said(server, chat)
            answer = Message("assistant", text)
            chat = Chat((*chat.messages, answer, Message("user", f"And {number}?")))
        for server in servers:
            prompts.append(await server.tokenize(chat))
        return prompts

    async def run() -> None:
        alone = await load_serving(settings(fleet, "alone", remote=None, fleet_secret=None))
        *expected, last = await conversation(alone)
        await alone.close()
        stranger = await load_serving(settings(fleet, "new", remote=None, fleet_secret=None))
        assert await stranger.tokenize(chat) != last  # rendered anew
        await stranger.close()
        monkeypatch.setattr(DiskTurns, "put", slow)
        pair = [await load_serving(settings(fleet, name)) for name in ("one", "two")]
        assert await conversation(*pair) == [*expected, last, last]
        may_write.set()
        for one in pair:
            await one.close()

    asyncio.run(run())


def test_a_response_is_found_at_another_server_by_its_tenant_only(fleet: Fleet) -> None:
    warnings: list[str] = []
    here, there = (
        open_responses(settings(fleet, name).engine, warnings.append) for name in ("one", "two")
    )
    stored = StoredResponse("resp_1", "ann", (), (), "{}", None, (), 1)
    here.put("tenant", stored)
    assert there.get("tenant", "resp_1") == stored
    assert there.get("other", "resp_1") is None
    assert there.delete("tenant", "resp_1")
    assert there.get("tenant", "resp_1") is None
    assert not there.delete("tenant", "resp_1")
    here.close()
    there.close()
    assert warnings == []
    assert not any(b"resp_1" in one.read_bytes() for one in fleet.objects())
