"""Requests come and go from many threads while one thread steps."""

from __future__ import annotations

import statistics
import sys
import threading
from collections.abc import Iterator
from random import Random

import pytest

from semantic.application.engine.batch_engine import BlockPoolBatchEngine
from semantic.domain.value_objects import TokenEvent
from tests.support.char_tokenizer import CharTokenizer
from tests.support.fake_clock import FakeClock
from tests.unit.application.world import Done, World, completions, expected, text_of, world

pytestmark = pytest.mark.process

PATIENCE = 60.0
"""Seconds after which a thread that has not ended counts as locked up."""


@pytest.fixture
def eager_threads() -> Iterator[None]:
    """Threads change places after every few instructions."""
    kept = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(kept)


class Client(threading.Thread):
    """Submits, cancels some, and remembers what it asked."""

    def __init__(self, of: World, number: int, requests: int) -> None:
        super().__init__()
        self.of = of
        self.number = number
        self.requests = requests
        self.asked: dict[str, tuple[tuple[int, ...], int]] = {}
        self.cancelled: set[str] = set()

    def run(self) -> None:
        random = Random(self.number)
        for i in range(self.requests):
            prompt = text_of(random.randrange(3), random.choice([2, 30, 257, 300]))
            n = random.choice([1, 4, 20])
            uid = self.of.engine.submit(f"agent {random.randrange(5)}", prompt, None, n)
            self.asked[uid] = prompt, n
            if i % 3 == 0 and self.of.engine.cancel(random.choice(list(self.asked))):
                self.cancelled.add(uid)


def check(of: World, clients: list[Client], done: list[Done]) -> None:
    """Each listener got every answer exactly once."""
    asked = {uid: what for client in clients for uid, what in client.asked.items()}
    assert sorted(one.uid for one in done) == sorted(asked)
    for one in done:
        prompt, n = asked[one.uid]
        answer = expected(of.spec, prompt, n).tokens
        assert one.finish_reason in ("length", "cancelled")
        assert one.tokens == answer[: len(one.tokens)]
        assert one.finish_reason == "cancelled" or one.tokens == answer
    of.check()
    of.forget_all()
    assert (of.pool.used_blocks, of.backend.held_bytes) == (0, 0)


@pytest.mark.usefixtures("eager_threads")
@pytest.mark.parametrize("columns", [4, 40])
def test_four_threads_submit_and_cancel_while_one_steps(columns: int) -> None:
    of = world("window", columns)
    clients = [Client(of, number, 40) for number in range(4)]
    for client in clients:
        client.start()
    done: list[Done] = []
    while any(client.is_alive() for client in clients) or of.engine.has_work:
        done += completions(of.engine.step_once())
    for client in clients:
        client.join(PATIENCE)
    check(of, clients, done)


def test_a_thread_that_never_stops_stepping_does_not_keep_others_out() -> None:
    of = world("full", 40)
    done: list[Done] = []
    stop = threading.Event()

    def step() -> None:
        while not stop.is_set() or of.engine.has_work:
            done.extend(completions(of.engine.step_once()))

    stepper = threading.Thread(target=step)
    stepper.start()
    clients = [Client(of, number, 50) for number in range(4)]
    for client in clients:
        client.start()
    for client in clients:
        client.join(PATIENCE)
        assert not client.is_alive(), "a client never got the lock"
    stop.set()
    stepper.join(PATIENCE)
    assert not stepper.is_alive()
    check(of, clients, done)


def test_a_submission_is_not_delayed_by_a_step_that_computes() -> None:
    of = world("full", 40)
    of.engine.submit("a", text_of(0, 30), None, 30)
    submitted: list[str] = []
    computing = of.backend.decode

    def decode_and_submit() -> list[object]:
        """Another thread submits while the model computes; it must not have to wait."""
        if not submitted:
            thread = threading.Thread(
                target=lambda: submitted.append(of.engine.submit("b", [1, 2], None, 3))
            )
            thread.start()
            thread.join(PATIENCE)
            assert submitted, "submit waits for the model"
        return list(computing())

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(of.backend, "decode", decode_and_submit)
        done = list(of.engine.step())
    assert sorted(one.agent_id for one in done) == ["a", "b"]


def is_free(lock: threading.RLock) -> bool:
    """Whether another thread could take it now."""
    taken: list[bool] = []

    def take() -> None:
        taken.append(lock.acquire(blocking=False))
        if taken[0]:
            lock.release()

    thread = threading.Thread(target=take)
    thread.start()
    thread.join(PATIENCE)
    return taken == [True]


def test_a_step_does_not_wait_for_a_prompt_that_is_being_encoded() -> None:
    free: list[bool] = []

    class WatchingTokenizer(CharTokenizer):
        def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
            free.append(is_free(engine._lock))
            return super().encode(text, add_special_tokens=add_special_tokens)

    of = world("full")
    engine = BlockPoolBatchEngine(of.backend, WatchingTokenizer(), of.pool, of.spec)
    engine.submit("a", "hello", None, 3)
    assert free == [True]


# How long running agents wait, on a simulated clock


@pytest.mark.parametrize("prompt", [2000, 9000])
def test_running_agents_keep_talking_while_a_long_prompt_is_computed(prompt: int) -> None:
    clock = FakeClock()
    of = World(world().spec, 200, largest_chunk=2048, clock=clock)
    for i in range(3):
        of.engine.submit(f"talker {i}", text_of(i, 20), None, 150)
    for _ in range(5):
        of.engine.step_once()
    of.engine.submit("reader", text_of(9, prompt), None, 2)
    last: dict[str, float] = {}
    gaps: list[float] = []
    while of.engine.has_work:
        for event in of.engine.step_once():
            if isinstance(event, TokenEvent) and event.agent_id != "reader":
                gaps.append(clock.now - last.get(event.agent_id, clock.now))
                last[event.agent_id] = clock.now
    assert max(gaps) < 1.5 * 0.25
    beside_reading = [gap for gap in gaps if gap > 0.021]
    assert statistics.median(beside_reading) > 0.6 * 0.25, "no less"
