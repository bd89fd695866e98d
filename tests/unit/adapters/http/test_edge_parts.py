"""Parts of the edge that need no connection: keys, observers, metrics, lines of the log."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncGenerator
from dataclasses import replace

import pytest
from pydantic import TypeAdapter
from starlette.types import Message, Receive, Scope, Send
from typing_extensions import TypedDict

from semantic.domain.answer import (
    AnswerEnd,
    AnswerEvent,
    AnswerStarted,
    PromptProgress,
    TextDelta,
    Usage,
)
from semantic.domain.block_hash import tenant_id, tenant_tag
from semantic.domain.errors import InvalidRequestError, OverloadedError
from semantic.domain.match import CacheMiss, MatchEnd, MatchReport
from semantic.domain.request_parts import Change, Difference, PartKind
from semantic.domain.value_objects import Lane, SamplingParams
from semantic.ports.serving import Ask
from semantic.serve import log_tenants
from semantic_server.http import request_body
from semantic_server.http.answer_records import AnswerRecord, InstrumentedServing, usage_extension
from semantic_server.http.errors import FieldError, TooLargeError
from semantic_server.http.identity import ApiKeys, AuthMiddleware, tenant_name
from semantic_server.http.logs import (
    LOG_FIELDS,
    PROGRESS_INTERVAL,
    JsonLines,
    ProgressLog,
    RequestLogEntry,
    TextLines,
)
from semantic_server.http.metrics import Metrics
from semantic_server.http.middleware import host_of
from semantic_server.http.request_body import MAX_MEMBERS, MAX_VALUES, parse_object, validated
from tests.support.fake_clock import FakeClock
from tests.support.fake_serving import FakeServing, Script
from tests.support.runnable_serving import RunnableFake

ASK = Ask("prompt", SamplingParams(), agent="me")
MATCH = MatchReport(100, 60, MatchEnd.COMPLETE, "disk", seconds=4.0)


class Seen:
    """Implements `Observer`; remembers."""

    def __init__(self) -> None:
        self.events: list[tuple[object, ...]] = []
        self.records: list[AnswerRecord] = []

    def accepted(self, uid: str, agent: str, prompt_tokens: int) -> None:
        self.events.append(("accepted", uid, agent, prompt_tokens))

    def prefilled(self, uid: str, done: int, total: int) -> None:
        self.events.append(("prefilled", uid, done, total))

    def first_token(self, uid: str) -> None:
        self.events.append(("first_token", uid))

    def finished(self, uid: str | None, record: AnswerRecord) -> None:
        self.events.append(("finished", uid))
        self.records.append(record)


class Slow(FakeServing):
    """Answers in five seconds of a clock that stands still otherwise."""

    def __init__(self, clock: FakeClock) -> None:
        super().__init__()
        self.clock = clock

    async def answer(self, ask: Ask) -> AsyncGenerator[AnswerEvent, None]:
        yield AnswerStarted("u", ask.agent or "", 100)
        self.clock.advance(1.0)
        yield PromptProgress(50, 99)
        self.clock.advance(5.0)
        yield TextDelta("a")
        self.clock.advance(0.5)
        yield TextDelta("b")
        self.clock.advance(1.5)
        yield AnswerEnd("stop", Usage(100, 60, 3), match=MATCH)


def observed(serving: FakeServing, seen: Seen, take: int = 99) -> None:
    clock = serving.clock if isinstance(serving, Slow) else FakeClock()

    async def run() -> None:
        answer = InstrumentedServing(serving, [seen], clock).answer(ASK)
        async for _ in answer:
            take_left[0] -= 1
            if not take_left[0]:
                break
        await answer.aclose()

    take_left = [take]
    asyncio.run(run())


def test_an_answer_is_timed_by_its_events() -> None:
    seen = Seen()
    observed(Slow(FakeClock()), seen)
    (record,) = seen.records
    assert [event[0] for event in seen.events] == [
        "accepted",
        "prefilled",
        "first_token",
        "finished",
    ]
    assert (record.ttft, record.total, record.gaps) == (6.0, 8.0, [0.5])
    assert (record.prefill, record.queue_time, record.decode) == (4.0, 2.0, 2.0)
    assert (record.tokens_per_second, record.finish) == (1.0, "stop")


def test_an_answer_that_nobody_waits_for_is_cancelled_and_a_refused_one_says_why() -> None:
    seen = Seen()
    serving = FakeServing()
    observed(serving, seen, take=1)
    assert (seen.records[0].finish, serving.cancelled) == ("cancelled", ["request-0"])
    refused = FakeServing(lambda _: Script(failure=OverloadedError("full", retry_after=1)))
    with pytest.raises(OverloadedError):
        observed(refused, seen)
    assert seen.events[-1] == ("finished", None)
    assert (seen.records[1].finish, seen.records[1].error) == ("refused", "full")


def test_metrics_tell_what_was_restored_and_what_it_saved() -> None:
    metrics = Metrics("m", RunnableFake().figures)
    record = AnswerRecord("me", Usage(100, 60, 3), MATCH, 6.0, 8.0, [0.5], "stop")
    metrics.finished("u", record)
    lines = metrics.text().decode().splitlines()
    for line in (
        'semantic_restores_total{model_name="m",source="disk"} 1.0',
        'semantic_restored_tokens_total{model_name="m",source="disk"} 60.0',
        'semantic_prefill_seconds_saved_total{model_name="m"} 6.0',  # 60 tokens, 40 took 4 s
        'vllm:prefix_cache_queries_total{model_name="m"} 100.0',
        'vllm:kv_cache_usage_perc{model_name="m"} 0.25',
        'vllm:num_requests_running{model_name="m"} 1.0',
        'semantic_store_events_total{event="damaged",tier="disk"} 1.0',
        'semantic_store_events_total{event="dropped",tier="disk"} 4.0',
        "semantic_disk_written_bytes_total 70.0",
        "semantic_disk_written_today_bytes 50.0",
        "semantic_disk_written_max_bytes 50.0",
        "semantic_disk_writes_held_back 1.0",
        "semantic_disk_rated_share 0.07",
        'vllm:request_prefill_time_seconds_sum{model_name="m"} 4.0',
        'vllm:inter_token_latency_seconds_count{model_name="m"} 1.0',
    ):
        assert line in lines, line


def test_requests_wait_until_they_are_computed() -> None:
    metrics = Metrics("m", lambda: None)

    def now() -> tuple[bool, bool]:
        text = metrics.text().decode()
        return (
            'vllm:num_requests_waiting{model_name="m"} 1.0' in text,
            'vllm:num_requests_running{model_name="m"} 1.0' in text,
        )

    metrics.accepted("u", "me", 5)
    assert now() == (True, False)
    metrics.prefilled("u", 1, 4)
    assert now() == (False, True)
    metrics.finished("u", AnswerRecord())
    assert now() == (False, False)
    assert 'semantic_requests_failed_total{finished_reason="cancelled"' in metrics.text().decode()


def test_a_long_prefill_is_told_every_few_seconds(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "semantic.server")
    clock = FakeClock()
    progress = ProgressLog(clock)
    progress.accepted("u", "me", 100)
    for done in range(0, 100, 10):
        clock.advance(PROGRESS_INTERVAL / 4)
        progress.prefilled("u", done, 99)
    progress.finished("u", AnswerRecord())
    progress.prefilled("u", 99, 99)
    assert vars(progress)["_begun"] == {}
    assert [record.message for record in caplog.records] == ["prefill 30/99", "prefill 70/99"]
    speed = 10 / (PROGRESS_INTERVAL / 4)
    fields = [vars(record)[LOG_FIELDS] for record in caplog.records]
    assert [one["tok_s"] for one in fields] == pytest.approx([speed, speed])
    assert [one["left_s"] for one in fields] == pytest.approx([69 / speed, 29 / speed])


def test_lines_are_one_line_whatever_a_name_holds() -> None:
    record = logging.LogRecord("semantic.server", logging.INFO, "", 0, "request", (), None)
    vars(record)[LOG_FIELDS] = {"agent": 'a b\n"\x1b[0m', "ttft_s": 0.12345, "tok_s": None, "n": 3}
    line = TextLines().format(record)
    assert line.endswith(r'info request agent="a b\n\"\u001b[0m" ttft_s=0.123 n=3')
    found = json.loads(JsonLines().format(record))
    assert (found["event"], found["agent"], found["tok_s"]) == ("request", 'a b\n"\x1b[0m', None)


def test_a_key_is_known_by_its_digest_and_its_tenant_is_the_same_after_a_restart() -> None:
    keys = ApiKeys(["one", "two"])
    assert keys.tenant("two") == ApiKeys(["two"]).tenant("two") == tenant_name("two")
    assert keys.tenant("one") != keys.tenant("two")
    assert [keys.tenant(wrong) for wrong in ("", "on", "one ", "One")] == [None] * 4
    assert "two" not in str(vars(keys)) + str(keys.tenant("two"))
    assert not ApiKeys()


def test_a_tenant_leaves_others_as_many_requests_as_it_has() -> None:
    assert asyncio.run(_statuses("abc", "aaaaabbbc")) == [0, 0, 0, 0, 429, 0, 0, 429, 0]
    assert asyncio.run(_statuses("a", "a" * 9)) == [0] * 9


async def _statuses(keys: str, asked: str) -> list[int]:
    """The statuses of requests that go on beside each other; 0 of those that are let in.

    Afterwards, when all have ended, as many are let in again.
    """
    ended, running = asyncio.Event(), list[asyncio.Future[None]]()

    async def goes_on(_scope: Scope, _receive: Receive, _send: Send) -> None:
        await ended.wait()

    async def receive() -> Message:
        raise AssertionError("it has no body")

    async def status(key: str) -> int:
        sent: list[Message] = []

        async def send(message: Message) -> None:
            sent.append(message)

        headers = [(b"x-api-key", key.encode())]
        scope = {"type": "http", "path": "/v1/chat/completions", "headers": headers}
        running.append(asyncio.ensure_future(auth(scope, receive, send)))
        await asyncio.sleep(0)
        return sent[0]["status"] if sent else 0

    auth = AuthMiddleware(goes_on, ApiKeys(keys), ApiKeys(), max_requests=8)
    found = [await status(key) for key in asked]
    ended.set()
    await asyncio.gather(*running)
    ended.clear()
    assert [await status(key) for key in asked] == found
    ended.set()
    await asyncio.gather(*running)
    return found


@pytest.mark.parametrize(
    ("authority", "host"),
    [
        ("localhost:80", "localhost"),
        ("[::1]:80", "::1"),
        ("LocalHost", "localhost"),
        ("", None),
        ("a@b", None),
        ("a/b", None),
        ("[::1", None),
        ("[::1]evil", None),
        ("[::1]evil:80", None),
        ("localhost:80evil", None),
        ("evil[::1]", None),
        ("local host", None),
        ("[]", None),
    ],
)
def test_the_host_of_a_header(authority: str, host: str | None) -> None:
    assert host_of(authority) == host


class Inner(TypedDict):
    content: str


class Outer(TypedDict):
    messages: list[Inner | list[int]]


def test_a_wrong_field_is_named_by_its_path_as_the_client_wrote_it() -> None:
    adapter = TypeAdapter(Outer)
    with pytest.raises(FieldError) as caught:
        validated(adapter, {"messages": [{"content": "a"}, {"content": 5}]})
    assert caught.value.param == "messages[1].content"
    with pytest.raises(FieldError) as caught:
        validated(adapter, {})
    assert caught.value.param == "messages"


class Metadata(TypedDict):
    model: str
    metadata: dict[str, str]
    words: list[str]


@pytest.mark.parametrize("field", ["metadata", "words"])
def test_of_many_wrong_values_the_first_is_named(field: str) -> None:
    """And few are described, which costs more than to find them."""
    n = 50_000
    body: dict[str, object] = {"model": "tiny", "metadata": {}, "words": []}
    body[field] = {str(i): i for i in range(n)} if field == "metadata" else [0] * n
    adapter = TypeAdapter(Metadata)
    fewer = request_body._fewer_errors(adapter, body)
    assert fewer is not None
    assert 0 < fewer.error_count() < 100
    with pytest.raises(FieldError, match="valid string") as caught:
        validated(adapter, body)
    assert caught.value.param == {"metadata": "metadata.0", "words": "words[0]"}[field]


def test_too_many_wrong_values_deep_inside_are_counted() -> None:
    with pytest.raises(InvalidRequestError, match=r"^5000 values of the body are invalid$"):
        validated(TypeAdapter(Outer), {"messages": [["a"] * 4999]})


def test_very_many_values_are_refused_unread() -> None:
    with pytest.raises(TooLargeError):
        parse_object(b'{"a":[' + b"1," * MAX_VALUES + b"1]}")


@pytest.mark.parametrize("key", [b'"%d"', b'"%d\\\\"', b'"\\"%d"  '])
def test_very_many_members_are_refused_unread_however_their_names_end(key: bytes) -> None:
    members = b",".join(key % n + b":1" for n in range(MAX_MEMBERS))
    with pytest.raises(TooLargeError):
        parse_object(b'{"a":{' + members + b"}}")


@pytest.mark.parametrize("text", [":", ",", "[{", '\\":', '":', "\\"])
def test_what_a_long_text_contains_is_no_value(text: str) -> None:
    body = {"a": text * (MAX_VALUES + 1), "b": ["\\", '"', text]}
    assert parse_object(json.dumps(body).encode()) == body


def test_a_requests_line_says_what_was_lost_and_why() -> None:
    line = RequestLogEntry()
    line.finished("u", AnswerRecord(agent="me", match=MATCH))
    assert {line.fields()[name] for name in ("lost", "lost_s", "lost_why")} == {None}
    tool = Difference(PartKind.TOOL, Change.CHANGED, 7, "Bash")
    for lost in (CacheMiss(5, 0.1), CacheMiss(40, 4.0, tool), CacheMiss(30, 3.0)):
        line.finished("u", AnswerRecord(match=replace(MATCH, end=MatchEnd.DIVERGED, lost=lost)))
    facts = line.fields()
    assert [facts[name] for name in ("lost", "lost_s", "lost_why")] == [
        40, 4.0, "Tool 7 (Bash) changed.",
    ]  # fmt: skip


def test_the_log_says_which_key_is_which_tenant_and_not_the_key(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "semantic.server")
    secret, names = bytes(32), [tenant_name(key) for key in ("first key", "second key")]
    log_tenants(secret, names)
    ids = [tenant_id(secret, tenant_tag(secret, name)) for name in names]
    said = [record.getMessage() for record in caplog.records]
    assert said == [f"API key {i + 1} of 2 is tenant {ids[i]}" for i in range(2)]
    assert len({*ids, *names, *(name[:16] for name in names)}) == 6


def test_usage_says_what_an_answer_depends_on() -> None:
    match = MatchReport(9, 8, MatchEnd.MISSING, "disk")
    usage = Usage(9, 8, 1, match=match)
    assert usage_extension(usage) == {"semantic": {"lost": None}}
    relaxed = usage_extension(replace(usage, match=replace(match, any_chip=True)))
    assert relaxed == {"semantic": {"lost": None, "any_chip": True}}
    noted = usage_extension(replace(usage, noted=2))
    assert noted == {"semantic": {"lost": None, "images_noted": 2}}
    for problem, exact in (("", True), ("--exact-batch is off", False)):
        found = usage_extension(replace(usage, lane=Lane(problem=problem)))
        assert found == {"semantic": {"lost": None, "exact_batch": exact}}
    outside = usage_extension(replace(usage, lane=Lane(), exact=False))
    assert outside == {"semantic": {"lost": None, "exact_batch": False}}
