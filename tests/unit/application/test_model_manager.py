"""Models that are loaded when they are asked for: once for all, and without harm if it fails."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import aclosing

import pytest

from semantic.domain.answer import AnswerEnd
from semantic.domain.chat import Chat, Message
from semantic.domain.errors import BackendError, ModelLoadError, ModelNotFoundError, OverloadedError
from semantic.domain.value_objects import SamplingParams
from semantic.ports.serving import Ask, EngineState, ServingPort
from tests.support.fake_models import FakeLoader, FakeUnit, fake_models

ASK = Ask(Chat((Message("user", "hello"),)), SamplingParams(), 9)

Scenario = Callable[[FakeLoader], Coroutine[object, object, None]]


def run(scenario: Scenario) -> FakeLoader:
    """Run on a loop of its own, with a loader that must be opened."""

    async def main() -> FakeLoader:
        loader = FakeLoader()
        async with asyncio.timeout(60):
            await scenario(loader)
        return loader

    return asyncio.run(main())


async def ask(serving: ServingPort) -> str:
    """The finish reason of an answer."""
    events = [event async for event in serving.answer(ASK)]
    assert isinstance(events[-1], AnswerEnd)
    return events[-1].reason


async def settled() -> None:
    """Let every task run that can."""
    for _ in range(20):
        await asyncio.sleep(0)


def test_many_who_wait_load_a_model_once() -> None:
    async def scenario(loader: FakeLoader) -> None:
        manager, models = fake_models(loader, "a", "b")
        tasks = [asyncio.create_task(ask(models.serving_of("a"))) for _ in range(50)]
        await settled()
        assert models.status("a").waiting == 50
        loader.open.set()
        assert await asyncio.gather(*tasks) == ["stop"] * 50
        assert (models.status("a").running, models.status("a").waiting) == (0, 0)
        await manager.close()

    assert run(scenario).loads == {"a": 1}


def test_a_shortage_of_memory_unloads_idle_models_and_the_next_request_loads_them_again() -> None:
    async def scenario(loader: FakeLoader) -> None:
        loader.open.set()
        manager, models = fake_models(loader, "a", "b", capacity=2)
        assert [await ask(models.serving_of(one)) for one in "ab"] == ["stop"] * 2
        assert await asyncio.to_thread(manager.give_up_idle, 1)
        await settled()
        assert list(manager.loaded()) == ["b"]
        assert await ask(models.serving_of("a")) == "stop"
        await manager.close()

    assert run(scenario).loads == {"a": 2, "b": 1}


def test_models_that_do_not_fit_together_take_turns_and_none_is_closed_under_a_request() -> None:
    async def scenario(loader: FakeLoader) -> None:
        loader.open.set()
        manager, models = fake_models(loader, "a", "b", "c", capacity=2)
        order = "abcabcaabbcc" * 4
        asked = [asyncio.create_task(ask(models.serving_of(one))) for one in order]
        assert await asyncio.gather(*asked) == ["stop"] * len(order)
        assert len(manager.loaded()) <= 2
        await manager.close()

    loader = run(scenario)
    assert loader.events[-1] == "close"
    assert loader.events.count("free") == loader.loads.total() - 2


def test_a_client_that_leaves_while_a_model_is_loaded_takes_nothing_along() -> None:
    async def scenario(loader: FakeLoader) -> None:
        manager, models = fake_models(loader, "a", "b")
        leaving = asyncio.create_task(ask(models.serving_of("a")))
        staying = asyncio.create_task(ask(models.serving_of("a")))
        await settled()
        leaving.cancel()
        await settled()
        assert models.status("a").waiting == 1
        loader.open.set()
        assert await staying == "stop"
        assert models.status("a").running == 0
        await manager.close()

    assert run(scenario).loads == {"a": 1}


def test_a_load_that_fails_is_told_to_all_who_wait_and_is_tried_again_by_the_next() -> None:
    async def scenario(loader: FakeLoader) -> None:
        loader.failures["b"] = BackendError("out of luck")
        loader.open.set()
        manager, models = fake_models(loader, "a", "b", capacity=2)
        assert await ask(models.serving_of("a")) == "stop"
        asked = [ask(models.serving_of("b")) for _ in range(3)]
        failed = await asyncio.gather(*asked, return_exceptions=True)
        told = "the model b cannot be loaded: "
        assert [str(one) for one in failed] == [f"{told}out of luck"] * 3
        assert {one.public for one in failed if isinstance(one, ModelLoadError)} == {
            f"{told}see the server's log"
        }
        assert models.status("a").state == "loaded"
        del loader.failures["b"]
        assert await ask(models.serving_of("b")) == "stop"
        await manager.close()

    assert run(scenario).loads == {"a": 1, "b": 2}


def test_a_model_that_takes_more_than_its_files_say_waits_for_more_room() -> None:
    async def scenario(loader: FakeLoader) -> None:
        loader.open.set()
        loader.sizes["c"] = 2
        manager, models = fake_models(loader, "a", "b", "c", capacity=2)
        assert [await ask(models.serving_of(one)) for one in "abc"] == ["stop"] * 3
        assert [one.n_bytes for one in models.statuses() if one.state == "loaded"] == [2]
        assert [await ask(models.serving_of(one)) for one in "ac"] == ["stop"] * 2
        await manager.close()

    # Looked at beside one of the others, then alone, and known from then on.
    assert run(scenario).loads == {"a": 2, "b": 1, "c": 3}


def test_a_model_that_grew_beyond_the_budget_is_refused_before_another_one_goes() -> None:
    async def scenario(loader: FakeLoader) -> None:
        loader.open.set()
        manager, models = fake_models(loader, "a", "b")
        assert await ask(models.serving_of("a")) == "stop"
        loader.estimates["b"] = 3 << 20
        with pytest.raises(ModelLoadError, match=r"b cannot be loaded.*needs 3 MiB") as refused:
            await ask(models.serving_of("b"))
        loader.estimates["b"], loader.sizes["b"] = 1, 3 << 20
        with pytest.raises(ModelLoadError, match=r"b cannot be loaded.*needs 3 MiB") as refused:
            await ask(models.serving_of("b"))
        assert "needs 3 MiB" in refused.value.public
        assert (models.status("b").state, models.status("b").waiting) == ("unloaded", 0)
        loader.estimates["b"] = 1
        del loader.sizes["b"]
        assert [await ask(models.serving_of(one)) for one in "ba"] == ["stop"] * 2
        await manager.close()

    assert run(scenario).loads == {"a": 2, "b": 2}


def test_a_defect_of_one_model_leaves_the_others() -> None:
    async def scenario(loader: FakeLoader) -> None:
        loader.failures["b"] = MemoryError("a defect")
        loader.open.set()
        manager, models = fake_models(loader, "a", "b")
        with pytest.raises(MemoryError, match="a defect"):
            await ask(models.serving_of("b"))
        assert await ask(models.serving_of("a")) == "stop"
        await manager.close()

    run(scenario)


def test_a_model_whose_engine_has_failed_is_loaded_again() -> None:
    async def scenario(loader: FakeLoader) -> None:
        loader.open.set()
        manager, models = fake_models(loader, "a")
        assert await ask(models.serving_of()) == "stop"
        unit = manager.loaded()["a"]
        assert isinstance(unit, FakeUnit)
        unit.state = EngineState.FAILED
        assert [await ask(models.serving_of()) for _ in range(2)] == ["stop", "stop"]
        assert unit.closed
        await manager.close()

    assert run(scenario).loads == {"a": 2}


def test_a_full_queue_refuses() -> None:
    async def scenario(loader: FakeLoader) -> None:
        manager, models = fake_models(loader, "a", max_waiting=2)
        tasks = [asyncio.create_task(ask(models.serving_of())) for _ in range(2)]
        await settled()
        with pytest.raises(OverloadedError, match="at most 2 requests may wait for a"):
            await ask(models.serving_of())
        loader.open.set()
        assert await asyncio.gather(*tasks) == ["stop", "stop"]
        await manager.close()

    run(scenario)


def test_a_server_that_stops_while_it_loads_gives_up_the_load_and_refuses_those_who_wait() -> None:
    async def scenario(loader: FakeLoader) -> None:
        manager, models = fake_models(loader, "a", "b")
        waiting = asyncio.create_task(ask(models.serving_of("b")))
        await settled()
        await manager.close()
        with pytest.raises(OverloadedError, match="stopping"):
            await waiting

    loader = run(scenario)
    assert (loader.cancelled, loader.events) == (1, ["load b", "close"])


def test_names_that_are_not_there_are_told_what_is() -> None:
    async def scenario(loader: FakeLoader) -> None:
        manager, models = fake_models(loader, "org/qwen", "llama")
        assert models.serving_of().model.id == "org/qwen"
        assert models.serving_of("default").model.id == "org/qwen"
        assert models.serving_of("./llama").model.id == "llama"
        with pytest.raises(ModelNotFoundError, match=r"'lama'.*org/qwen, default, llama; did you"):
            models.serving_of("lama")
        with pytest.raises(ModelNotFoundError, match=r"did you mean org/qwen\?"):
            models.keep("qwem", 1)
        await manager.close()

    run(scenario)


def test_an_operator_loads_and_unloads_and_a_ttl_of_nothing_unloads_after_each_request() -> None:
    async def scenario(loader: FakeLoader) -> None:
        loader.open.set()
        manager, models = fake_models(loader, "a", "b", capacity=2)
        assert (await models.load("b")).state == "loaded"
        assert (await models.load("b")).state == "loaded"
        assert (await models.unload("b")).state == "unloaded"
        assert (await models.unload("b")).state == "unloaded"
        models.keep("a", 0)
        assert await ask(models.serving_of("a")) == "stop"
        await settled()
        assert models.status("a").state == "unloaded"
        await manager.close()

    assert run(scenario).loads == {"a": 1, "b": 1}


def test_an_unload_waits_for_the_requests_that_use_the_model() -> None:
    async def scenario(loader: FakeLoader) -> None:
        loader.open.set()
        loader.held = asyncio.Event()
        manager, models = fake_models(loader, "a")
        running = asyncio.create_task(ask(models.serving_of()))
        await settled()
        assert models.status("a").running == 1
        unloading = asyncio.create_task(models.unload("a"))
        await settled()
        assert not unloading.done()
        loader.held.set()
        assert await running == "stop"
        assert (await unloading).state == "unloaded"
        await manager.close()

    run(scenario)


def test_an_answer_reads_tokens_of_its_model_while_another_one_waits_for_its_end() -> None:
    async def scenario(loader: FakeLoader) -> None:
        loader.open.set()
        manager, models = fake_models(loader, "a", "b")
        serving = models.serving_of("a")
        async with aclosing(serving.answer(ASK)) as events:
            await anext(events)
            others = []
            for one in "ba":
                others.append(asyncio.create_task(ask(models.serving_of(one))))
                await settled()
            assert [models.status(one).waiting for one in "ab"] == [1, 1]
            assert await serving.token_texts([104, 105]) == ("h", "i")
            assert await serving.detokenize([104]) == "h"
            assert models.status("a").running == 1
        assert await asyncio.gather(*others) == ["stop", "stop"]
        await manager.close()

    run(scenario)


def test_models_are_loaded_beforehand_as_far_as_they_fit() -> None:
    async def scenario(loader: FakeLoader) -> None:
        loader.open.set()
        manager, models = fake_models(loader, "a", "b", "c", capacity=2)
        manager.preload(["a", "b", "c"])
        await settled()
        assert [one.state for one in models.statuses()] == ["loaded", "loaded", "unloaded"]
        await manager.close()

    assert run(scenario).loads == {"a": 1, "b": 1}
