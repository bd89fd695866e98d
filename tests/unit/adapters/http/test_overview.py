"""/v1/overview and what it is made of: phases of requests, savings, samples, and who sees them."""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPConnection
from typing import Any

import pytest
from pydantic import SecretStr

from semantic.domain.answer import TextDelta, Usage
from semantic.domain.errors import OverloadedError
from semantic.domain.match import MatchEnd, MatchReport
from semantic.domain.value_objects import SamplingParams
from semantic.ports.agents import RunningRequest, TenantId
from semantic.ports.models import ModelStatus
from semantic.ports.serving import Ask, EngineFigures, EngineState, ServedModel
from semantic_server.http import activity
from semantic_server.http.activity import (
    MOST_SAMPLES,
    MOST_SPANS,
    MOST_WATCHERS,
    LiveRequest,
    Recorder,
    Watch,
)
from semantic_server.http.answer_records import AnswerRecord, InstrumentedServing
from semantic_server.http.app import create_app
from semantic_server.http.context import ServerContext
from semantic_server.http.errors import Problem, WireError
from semantic_server.http.identity import tenant_name
from semantic_server.http.overview import _add_load, _model_row
from semantic_server.http.settings import ServerSettings
from tests.support.fake_clock import FakeClock
from tests.support.fake_serving import FakeServing, Script
from tests.support.http_server import RunningServer, running
from tests.support.model_server import several
from tests.support.runnable_serving import RunnableFake
from tests.support.served_agents import AgentsWorld

ASK = Ask("prompt", SamplingParams(), agent="me")
DAY = 86_400.0
KEYS = ("the key of a", "the key of b")
OPERATOR = "the key of the operator"


def ended(prompt: int = 100, cached: int = 60, seconds: float = 4.0) -> AnswerRecord:
    match = MatchReport(prompt, cached, MatchEnd.COMPLETE, "pool", seconds=seconds)
    return AnswerRecord("me", Usage(prompt, cached, 7), match, finish="stop")


# Phases


def test_a_request_waits_reads_and_decodes() -> None:
    clock = FakeClock()
    recorder = Recorder(clock=clock)
    request = recorder.of("t")
    request.accepted("u", "me", 100)
    clock.advance(10)
    request.prefilled("u", 20, 99)
    request.prefilled("u", 99, 99)
    clock.advance(5)
    request.first_token("u")
    clock.advance(2)
    assert recorder.is_busy
    request.finished("u", ended(seconds=8.0))
    assert not recorder.is_busy
    (span,) = recorder.spans("t")
    # The first chunk is reported when it has been computed: reading began before that.
    assert span.phases == [("waiting", 0.0), ("reading", 7.0), ("decoding", 15.0)]
    assert (span.end, span.cached_tokens, span.generated_tokens) == (17.0, 60, 7)
    assert recorder.spans("another") == []
    assert recorder.spans(None, after=span.version) == []


def test_a_preempted_request_reads_again() -> None:
    recorder = Recorder(clock=FakeClock())
    request = recorder.of("")
    request.accepted("u", "me", 100)
    request.prefilled("u", 99, 99)
    request.first_token("u")
    request.prefilled("u", 0, 110)
    request.prefilled("u", 110, 110)
    request.first_token("u")
    request.finished("u", ended())
    (span,) = recorder.spans("")
    phases = [name for name, _ in span.phases]
    assert phases == ["waiting", "reading", "decoding", "preempted", "reading", "decoding"]


def test_the_time_line_is_bounded_in_requests_and_in_phases(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(activity, "_MOST_PHASES", 4)
    recorder = Recorder(clock=FakeClock())
    for number in range(MOST_SPANS + 5):
        request = recorder.of("")
        request.accepted(f"u{number}", "me", 1)
        for done in (1, 0, 1, 0, 1):
            request.prefilled(f"u{number}", done, 1)
        request.finished(f"u{number}", AnswerRecord())
    spans = recorder.spans("")
    assert (len(spans), spans[0].uid, len(spans[0].phases)) == (MOST_SPANS, "u5", 4)


def test_a_token_costs_the_recorder_nothing() -> None:
    def calls(n_tokens: int) -> int:
        counted = 0

        def clock() -> float:
            nonlocal counted
            counted += 1
            return 0.0

        recorder = Recorder(clock=clock)
        serving = FakeServing(lambda _: Script((TextDelta("a"),) * n_tokens))

        async def run() -> None:
            async for _ in InstrumentedServing(serving, [recorder.of("")]).answer(ASK):
                pass

        asyncio.run(run())
        return counted

    assert calls(2) == calls(500)


# Savings


def test_savings_are_each_tenants_own_and_an_operators_are_the_sum() -> None:
    clock = FakeClock()
    recorder = Recorder(clock=clock)
    clock.advance(100)
    for tenant, cached in (("a", 60), ("b", 80), ("b", 0)):
        request = recorder.of(tenant)
        request.accepted("u", "me", 100)
        request.finished("u", ended(cached=cached, seconds=(100 - cached) * 0.5))
    start, today = recorder.savings("b")
    assert (start.prompt_tokens, start.cached_tokens, start.seconds) == (200, 80, 40.0)
    assert today == start
    assert recorder.savings(None)[0].cached_tokens == 140
    assert recorder.savings("nobody")[0].prompt_tokens == 0


def test_a_saved_prefill_is_as_fast_as_those_of_its_length() -> None:
    clock = FakeClock()
    recorder = Recorder(clock=clock)
    clock.advance(1000)

    def answer(prompt: int, cached: int, seconds: float) -> float:
        request = recorder.of("")
        request.accepted("u", "me", prompt)
        request.finished("u", ended(prompt, cached, seconds))
        return recorder.savings("")[0].seconds

    assert answer(4000, 0, 4.0) == 0.0
    for _ in range(10):  # short tails that cost 100 times as much per token
        assert answer(10, 0, 1.0) == 0.0
    assert answer(3010, 3000, 1.0) == 3.0


def test_a_server_cannot_have_saved_more_than_all_cores_could_do_since_its_start() -> None:
    clock = FakeClock()
    recorder = Recorder(clock=clock)
    clock.advance(2)
    for _ in range(100):
        request = recorder.of("")
        request.accepted("u", "me", 100)
        request.finished("u", ended(cached=60, seconds=400.0))
    assert recorder.savings("")[0].seconds == 2 * (os.cpu_count() or 1)


def test_a_request_that_was_cancelled_before_its_end_saves_nothing() -> None:
    recorder = Recorder(clock=FakeClock())
    request = recorder.of("")
    request.accepted("u", "me", 100)
    request.finished("u", AnswerRecord("me", Usage(100, 0, 0)))
    assert recorder.savings("")[0].prompt_tokens == 0
    assert recorder.spans("")[0].finish == "cancelled"


def test_today_begins_with_the_server_and_then_at_midnight() -> None:
    clock = FakeClock()
    clock.advance(20 * DAY)
    recorder = Recorder(clock=clock)
    request = recorder.of("")
    request.accepted("u", "me", 100)
    request.finished("u", ended())
    assert recorder.savings("")[1].since == recorder.started
    clock.advance(DAY)
    start, today = recorder.savings("")
    assert (start.prompt_tokens, today.prompt_tokens) == (100, 0)
    assert recorder.started < today.since <= clock.now
    assert time.localtime(today.since)[3:6] == (0, 0, 0)


# Samples


def test_without_requests_and_watchers_nothing_runs() -> None:
    calls = 0

    def figures() -> None:
        nonlocal calls
        calls += 1

    async def run() -> None:
        watch = Watch(figures, lambda: None, interval=0.0)
        await asyncio.sleep(0)
        assert (calls, watch._task) == (0, None)
        with watch.watching(""):
            assert await watch.next()
        task = watch._task
        assert task is not None
        await task  # ends by itself
        request = watch.recorder.of("")
        request.accepted("u", "me", 1)
        again, before = watch._task, calls
        assert again not in {None, task}
        request.finished("u", AnswerRecord())
        assert again is not None
        await again
        assert calls > before

    asyncio.run(run())


def test_samples_are_bounded_and_a_closed_watch_ends_those_who_wait() -> None:
    async def run() -> None:
        fake = RunnableFake()
        watch = Watch(fake.figures, lambda: fake.agents, interval=0.0)
        with watch.watching(None):
            while len(watch.samples) < MOST_SAMPLES:
                assert await watch.next()
            first = watch.samples[0].at
            await watch.next()
            assert (len(watch.samples), watch.samples[0].at > first) == (MOST_SAMPLES, True)
            waiting = asyncio.ensure_future(watch.next())
            watch.close()
            assert not await waiting
            assert not await watch.next()

    asyncio.run(run())


def test_only_so_many_may_watch() -> None:
    async def run() -> None:
        watch = Watch(lambda: None, lambda: None)
        held = [watch.watching("a") for _ in range(MOST_WATCHERS)]
        for one in held:
            one.__enter__()
        with pytest.raises(WireError, match="expected at most 8 open pages"):
            watch.require_room("a")
        watch.require_room("b")
        held[0].__exit__(None, None, None)
        watch.require_room("a")
        watch.close()

    asyncio.run(run())


def test_a_request_decodes_at_the_speed_since_the_last_sample() -> None:
    served = AgentsWorld()

    async def run() -> None:
        watch = Watch(lambda: None, lambda: served.agents)
        with watch.watching(""):
            served.submit("ada", 20)
            await watch.next()
            assert [one.tokens_per_second for one in watch.live] == [None]
            served.world.clock.advance(2.0)
            for _ in range(3):
                served.engine.step_once()
            await watch._sample()
            (ada,) = watch.live
            assert ada.tokens_per_second == ada.request.generated_tokens / ada.request.seconds > 0
        watch.close()

    asyncio.run(run())


# Over HTTP


@pytest.fixture
def served() -> AgentsWorld:
    return AgentsWorld()


@pytest.fixture
def server(served: AgentsWorld) -> Iterator[RunningServer]:
    fake = RunnableFake()
    context = ServerContext(fake, agents=served.agents, figures=fake.figures, version="1.2")
    with running(app=create_app(context=context)) as found:
        yield found


@pytest.fixture
def keyed(served: AgentsWorld) -> Iterator[RunningServer]:
    fake = RunnableFake()
    context = ServerContext(fake, agents=served.agents, figures=fake.figures)
    keys = tuple(map(SecretStr, KEYS))
    settings = ServerSettings(api_keys=keys, operator_keys=(SecretStr(OPERATOR),))
    with running(app=create_app(settings=settings, context=context)) as found:
        yield found


def seen(server: RunningServer, key: str = "") -> dict[str, Any]:
    reply = server.ask("GET", "/v1/overview", headers={"x-api-key": key})
    assert reply.status == 200, reply.body
    return reply.json


@pytest.mark.process
def test_an_overview_of_a_server_without_keys(server: RunningServer, served: AgentsWorld) -> None:
    served.submit("ada", 20)
    body = {"model": "fake", "messages": [{"role": "user", "content": "Hi"}], "agent_id": "eve"}
    assert server.ask("POST", "/v1/chat/completions", body).status == 200
    found = seen(server)
    assert (found["model"], found["version"], found["role"]) == ("fake", "1.2", "local")
    assert found["tenants"] is None
    changes = found["changes"]
    assert changes["state"] == "ready"
    assert changes["samples"][-1]["tiers"] == {"pool": [25, 100], "disk": [300, 1000]}
    assert changes["written"] == {
        "today": 50,
        "total": 70,
        "since": "2026-01-01",
        "days": {"2026-01-01": 20, "2026-01-02": 50},
        "max_a_day": 50,
        "held_back": True,
        "failed": 0,
        "rated_share": 0.07,
    }
    (ada,) = changes["requests"]
    assert (ada["agent"], ada["state"], ada["tokens_per_second"]) == ("ada", "prefill", None)
    assert changes["models"] is None, "there is one model"
    only = changes["only"]
    assert (only["id"], only["state"], only["pool"]) == ("fake", "loaded", [25, 100])
    assert only["facts"]["context_tokens"] == 512
    (eve,) = changes["spans"]
    assert (eve["agent"], eve["finish"], eve["prompt_tokens"]) == ("eve", "stop", 2)
    assert eve["end"] >= eve["phases"][0][1]


@pytest.mark.process
def test_a_refused_request_is_shown_with_its_error_to_who_sent_it(keyed: RunningServer) -> None:
    own, other = ({"x-api-key": key} for key in KEYS)
    chat = "/v1/chat/completions"
    assert keyed.ask("POST", chat, {"model": "fake", "messages": []}, own).status == 400
    missing = keyed.ask("POST", "/v1/nowhere", {}, own)
    assert missing.status == 404
    assert b"POST /v1/nowhere is not a route" in missing.body
    assert keyed.ask("POST", chat, {}, {"x-api-key": "wrong"}).status == 401
    assert keyed.ask("GET", "/v1/overview").status == 401
    assert keyed.ask("GET", "/v1/models", None, other).status == 200

    def shown(key: str) -> list[tuple[int, str, str]]:
        spans = seen(keyed, key)["changes"]["spans"]
        return [(one["status"], one["route"], one["error"].split(";")[0]) for one in spans]

    refused = [
        (400, f"POST {chat}", "messages: expected at least one message"),
        (404, "POST /v1/nowhere", "POST /v1/nowhere is not a route"),
    ]
    assert shown(KEYS[0]) == refused
    assert shown(KEYS[1]) == []
    assert [status for status, *_ in shown(OPERATOR)] == [400, 404, 401]


@pytest.mark.process
def test_a_failed_answer_is_shown_with_its_error() -> None:
    failures = iter(
        (
            Script(failure=OverloadedError("the queue is full", retry_after=1)),
            Script((TextDelta("All"),), reason="error", error="a secret of the machine"),
        )
    )
    with running(FakeServing(lambda _: next(failures))) as server:
        body = {"model": "fake", "messages": [{"role": "user", "content": "Hi"}]}
        asked = [server.ask("POST", "/v1/chat/completions", body).status for _ in range(2)]
        assert asked == [503, 500]
        spans = seen(server)["changes"]["spans"]
    assert [(one["status"], one["error"]) for one in spans] == [
        (503, "the queue is full"),
        (500, "the model failed during the answer"),
    ]


def test_refused_requests_do_not_displace_answers() -> None:
    recorder = Recorder(clock=FakeClock())
    request = recorder.of("")
    request.accepted("u", "me", 1)
    request.finished("u", ended())
    for number in range(MOST_SPANS * 2):
        recorder.refuse(str(number), "", "POST ?", Problem(404, "x" * 10_000))
    spans = recorder.spans("")
    assert spans[-1].uid == "u"
    assert len(spans) < MOST_SPANS
    assert {len(one.error or "") for one in spans[:-1]} == {500}


@pytest.mark.process
def test_before_the_model_is_loaded_the_state_is_told() -> None:
    with running(app=create_app(context=ServerContext())) as server:
        found = seen(server)
    assert (found["model"], found["changes"]["state"]) == (None, "loading")


@pytest.mark.process
def test_a_tenant_sees_its_own_and_an_operator_all(
    keyed: RunningServer, served: AgentsWorld
) -> None:
    names = [tenant_name(key) for key in KEYS]
    for name, agent in zip(names, ("ada", "bob"), strict=True):
        served.submit(agent, 20, tenant=name)
    body = {"model": "fake", "messages": [{"role": "user", "content": "Hi"}], "agent_id": "eve"}
    headers = {"x-api-key": KEYS[1]}
    assert keyed.ask("POST", "/v1/chat/completions", body, headers).status == 200
    own, other, all_of = seen(keyed, KEYS[1]), seen(keyed, KEYS[0]), seen(keyed, OPERATOR)
    assert [one["agent"] for one in own["changes"]["requests"]] == ["bob"]
    assert [one["agent"] for one in own["changes"]["spans"]] == ["eve"]
    assert [one["agent"] for one in other["changes"]["requests"]] == ["ada"]
    assert (other["changes"]["spans"], other["role"]) == ([], "tenant")
    for one in (own, other):  # they are about all tenants
        assert (one["changes"]["samples"], one["tenants"]) == (None, None)
        assert one["changes"]["written"] is None
        assert "tenant" not in {
            key for row in one["changes"]["requests"] for key in row if row[key]
        }
    assert [one["agent"] for one in all_of["changes"]["requests"]] == ["ada", "bob"]
    ids = [served.agents.id_of(name).id for name in names]
    assert [one["tenant"] for one in all_of["changes"]["requests"]] == ids
    assert [one["tenant"] for one in all_of["changes"]["spans"]] == ids[1:]
    assert (all_of["role"], all_of["tenants"]) == ("operator", sorted(ids))
    assert all_of["changes"]["samples"]
    assert keyed.ask("GET", "/v1/overview").status == 401
    assert keyed.ask("GET", "/v1/overview/stream").status == 401


@pytest.mark.process
def test_an_overview_of_several_models_has_a_row_for_each() -> None:
    with several() as one:
        chat = {"model": "llama", "messages": [{"role": "user", "content": "Hi"}]}
        assert one.ask("POST", "/v1/chat/completions", chat).status == 200
        changes = seen(one.server)["changes"]
        qwen, llama = changes["models"]
        assert (qwen["id"], qwen["state"], qwen["pool"]) == ("org/qwen", "unloaded", None)
        assert (llama["id"], llama["state"], llama["pool"]) == ("llama", "loaded", [25, 100])
        assert (llama["running"], llama["waiting"], llama["agents"]) == (0, 0, 1)
        assert (qwen["idle_for"], llama["idle_for"] >= 0) == (None, True)
        assert llama["tokens_per_second"] == 0
        assert [span["model"] for span in changes["spans"]] == ["llama"]


@pytest.mark.process
def test_of_several_models_a_tenant_sees_the_state_and_not_what_others_do() -> None:
    settings = ServerSettings(api_keys=(SecretStr(KEYS[0]),), operator_keys=(SecretStr(OPERATOR),))
    with several(settings) as one:
        assert one.ask("POST", "/v1/models/llama/load", key=OPERATOR).status == 200
        _, own = seen(one.server, KEYS[0])["changes"]["models"]
        _, of_all = seen(one.server, OPERATOR)["changes"]["models"]
        assert own["state"] == of_all["state"] == "loaded"
        hidden = (
            "weights_bytes",
            "idle_for",
            "running",
            "waiting",
            "agents",
            "pool",
            "tokens_per_second",
        )
        assert [own[name] for name in hidden] == [None] * len(hidden)
        assert None not in [of_all[name] for name in hidden]


def test_a_models_speed_is_that_of_its_answers() -> None:
    served = ServedModel(("a",), 512, 100, 1)
    status = ModelStatus(served, "loaded", 1, 2, 0, pinned=False, expires_in=None)
    row = _model_row(status)
    tenant = TenantId("t")
    rates = ("1", "a", 3.0), ("2", "b", 9.0), ("3", "a", 4.0), ("4", "a", None)
    live = [
        LiveRequest(RunningRequest(uid, "ada", tenant, "decode", 1, 1, 0, 1, 1.0, 0, model), rate)
        for uid, model, rate in rates
    ]
    engine = EngineFigures(EngineState.READY, running=3, idle=2, pool_used_bytes=1, pool_bytes=9)
    _add_load(row, status, engine, live)
    assert (row.tokens_per_second, row.agents, row.pool) == (7.0, 5, (1, 9))


@pytest.mark.process
def test_a_stream_begins_with_everything_and_then_tells_changes(
    server: RunningServer, served: AgentsWorld
) -> None:
    with events(server) as told:
        name, first = next(told)
        assert (name, first["object"]) == ("overview", "overview")
        served.submit("ada", 20)
        (name, second), last = next(told), first["changes"]["samples"][-1]["at"]
        assert name == "changes"
        assert [one["agent"] for one in second["requests"]] == ["ada"]
        assert [one["at"] > last for one in second["samples"]] == [True]


@pytest.mark.process
def test_an_open_stream_does_not_delay_the_end_of_the_server() -> None:
    fake = RunnableFake()
    context = ServerContext(fake, agents=fake.agents, figures=fake.figures)
    settings = ServerSettings(stop_timeout=300)  # `running` waits for less
    with (
        running(settings=settings, app=create_app(settings=settings, context=context)) as server,
        events(server) as told,
    ):
        next(told)
        server.server.stop()
        assert all(name == "changes" for name, _ in told)


@contextmanager
def events(server: RunningServer) -> Iterator[Iterator[tuple[str, dict[str, Any]]]]:
    """The events of a stream, each with its name and data."""
    connection = HTTPConnection("127.0.0.1", server.port, timeout=60)
    connection.request("GET", "/v1/overview/stream")
    response = connection.getresponse()
    assert response.status == 200

    def read() -> Iterator[tuple[str, dict[str, Any]]]:
        while line := response.readline():
            if line.startswith(b"event: "):
                name = line[7:].decode().strip()
                yield name, json.loads(response.readline().removeprefix(b"data: "))

    try:
        yield read()
    finally:
        connection.close()
