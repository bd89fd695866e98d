"""Several real models in one process: their answers are those of each alone, however they swap."""

from __future__ import annotations

import asyncio
import gc
import shutil
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import mlx.core as mx
import pytest

from semantic import serve_models
from semantic.adapters.mlx.model import description
from semantic.adapters.mlx.model.description import ModelDescription
from semantic.application.models.on_demand import ManagedModels
from semantic.application.models.residency import Patience
from semantic.composition.engine_settings import Settings
from semantic.domain.answer import Usage
from semantic.domain.errors import (
    InvalidRequestError,
    ModelLoadError,
    ModelNotFoundError,
    OverloadedError,
)
from semantic.ports.models import Arrived
from semantic.ports.serving import ServingPort
from semantic.serve import ServeSettings, load_serving
from semantic.serve_models import ModelsSettings, load_models
from tests.support import asked
from tests.support.model_folder import write_model
from tests.support.model_hub import Hub, running_hub, use_hub
from tests.support.own_process import in_own_process

pytestmark = pytest.mark.process

T = TypeVar("T")

NAMES = ("qwen3_coder", "glm47", "mistral")
MIB = 1 << 20
POOL, TIER = 8 * MIB, 64 * MIB
AGENTS, TURNS, TOKENS = 3, 3, 8
HASTY = Patience(residence=0.0, linger=0.0)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, ...]:
    """Three tiny models with tokenizers of their own."""
    root = tmp_path_factory.mktemp("models")
    return tuple(write_model(root / name, name) for name in NAMES)


def served(folder: Path, store: Path | None = None) -> ServeSettings:
    engine = Settings(
        str(folder),
        pool_bytes=POOL,
        memory_bytes=TIER,
        use_disk=store is not None,
        store=store,
        disk_bytes=64 * MIB,
    )
    return ServeSettings(engine)


def run(work: Callable[[], Coroutine[None, None, T]]) -> T:
    async def main() -> T:
        async with asyncio.timeout(120):
            return await work()

    return asyncio.run(main())


async def ask(
    serving: ServingPort, agent: str, prompt: tuple[int, ...], n: int = TOKENS
) -> tuple[str, Usage]:
    return await asked.ask(serving, agent, prompt, n)


def prompt_of(agent: int, turn: int) -> tuple[int, ...]:
    """It begins with that of the turn before."""
    return tuple((agent * 31 + i * i * 7 + i) % 500 + 20 for i in range(40 + 40 * turn))


async def talk(serving: ServingPort, agent: int) -> list[tuple[str, int]]:
    """Each answer of an agent's turns, and how many tokens of its prompt were cached."""
    found = []
    for turn in range(TURNS):
        text, usage = await ask(serving, f"agent {agent}", prompt_of(agent, turn))
        found.append((text, usage.cached))
    return found


def two_of(folders: Sequence[Path], *, fit: int = 2, **options: object) -> ModelsSettings:
    """A budget in which `fit` models fit."""
    most = TIER + fit * (POOL + MIB)
    return ModelsSettings([served(one) for one in folders], max_bytes=most, **options)  # type: ignore[arg-type]  # by name


async def alone(folder: Path) -> list[list[tuple[str, int]]]:
    serving = await load_serving(served(folder))
    try:
        return [await talk(serving, agent) for agent in range(AGENTS)]
    finally:
        await serving.close()


def test_models_that_swap_under_load_answer_as_each_alone_and_lose_no_agent(
    folders: tuple[Path, ...],
) -> None:
    async def work() -> int:
        expected = [await alone(folder) for folder in folders]
        models = await load_models(two_of(folders))
        talks = [talk(models.serving_of(name), agent) for agent in range(AGENTS) for name in NAMES]
        found = await asyncio.gather(*talks)
        for i, turns in enumerate(found):
            assert turns == expected[i % len(NAMES)][i // len(NAMES)]
            assert [cached > 0 for _, cached in turns] == [False, True, True]
        again = [await ask(models.serving_of(name), "agent 0", prompt_of(0, 3)) for name in NAMES]
        assert all(usage.cached >= len(prompt_of(0, 2)) - 1 for _, usage in again)
        loads = models.loads
        await models.close()
        return loads

    assert run(work) > len(NAMES), "at least one was loaded again"


def test_two_that_fit_decode_beside_each_other_and_beside_a_load(folders: tuple[Path, ...]) -> None:
    async def work() -> None:
        models = await load_models(two_of(folders, fit=3, loaded=2))
        await models.load(NAMES[1])
        long = asyncio.create_task(ask(models.serving_of(), "long", prompt_of(7, 0), 400))
        other = asyncio.create_task(ask(models.serving_of(NAMES[1]), "b", prompt_of(8, 0), 20))
        third = asyncio.create_task(ask(models.serving_of(NAMES[2]), "c", prompt_of(9, 0), 4))
        done, _ = await asyncio.wait((long, other, third), return_when=asyncio.FIRST_COMPLETED)
        assert long not in done
        await asyncio.gather(long, other, third)
        assert (await long)[1].completion == 400
        await models.close()

    run(work)


def test_a_time_that_ends_within_an_answer_waits_for_its_end(folders: tuple[Path, ...]) -> None:
    async def work() -> None:
        models = await load_models(two_of(folders))
        serving, name = models.serving_of(), NAMES[0]
        whole, _ = await ask(serving, "ann", prompt_of(1, 0), 60)
        answer = asyncio.create_task(ask(serving, "bob", prompt_of(1, 0), 60))
        while not models.figures().engine.running:
            await asyncio.sleep(0)
        models.keep(name, 0)
        await models.load(NAMES[1])
        assert (await answer)[0] == whole
        while models.status(name).state != "unloaded":
            await asyncio.sleep(0.001)
        again, usage = await ask(serving, "bob", prompt_of(1, 0), 60)
        assert (again, usage.cached > 0) == (whole, True)
        await models.close()

    run(work)


def test_a_model_that_is_unloaded_gives_its_memory_back(folders: tuple[Path, ...]) -> None:
    in_own_process("tests.integration.test_several_models:memory_after_unloading", *folders)


def memory_after_unloading(*paths: str) -> None:
    """It is what it was before, but for half of a model's weights, each of three times."""
    folders = tuple(map(Path, paths))
    weights = min((folder / "model.safetensors").stat().st_size for folder in folders)
    before = mx.get_active_memory()

    async def work() -> None:
        models = await load_models(two_of(folders, fit=3))
        for _ in range(3):
            for name in NAMES:
                await ask(models.serving_of(name), "ann", prompt_of(1, 1))
            assert mx.get_active_memory() > before + 3 * weights / 2
            for name in NAMES:
                await models.unload(name)
            assert mx.get_active_memory() < before + weights / 2
        await models.close()

    run(work)


def test_files_that_change_between_two_loads_are_refused_before_another_model_goes(
    folders: tuple[Path, ...], tmp_path: Path
) -> None:
    own = Path(shutil.copytree(folders[1], tmp_path / "own"))
    file = own / "model.safetensors"
    whole = file.read_bytes()
    larger = tmp_path / "larger.safetensors"
    mx.save_safetensors(str(larger), {"a": mx.zeros((16, MIB), mx.float32)})

    async def work() -> None:
        models = await load_models(two_of((folders[0], own), fit=1, patience=HASTY))
        first, second = models.serving_of(), models.serving_of("own")
        text, _ = await ask(second, "ann", prompt_of(1, 0))
        await ask(first, "ann", prompt_of(1, 0))
        for damaged, reason in (
            (whole[: len(whole) // 2], "cannot build the model"),
            (larger.read_bytes(), r"needs \d+ MiB .* at most the 9 MiB"),
        ):
            file.write_bytes(damaged)
            with pytest.raises(ModelLoadError, match=reason):
                await ask(second, "ann", prompt_of(1, 0))
            assert models.status(NAMES[0]).state == "loaded"
        loads = models.loads
        await ask(first, "ann", prompt_of(1, 1))
        assert models.loads == loads
        file.write_bytes(whole)
        again, usage = await ask(second, "ann", prompt_of(1, 0))
        assert (again, usage.cached > 0) == (text, True)
        await models.close()

    run(work)


def test_the_budget_counts_what_weights_take_and_a_load_that_exceeds_it_reads_none(
    folders: tuple[Path, ...],
) -> None:
    in_own_process("tests.integration.test_several_models:memory_of_loads", *folders[:2])


def memory_of_loads(*paths: str) -> None:
    """A load takes what it is counted for, and nothing where that is too much."""
    folders = tuple(map(Path, paths))

    def wrong(folder: Path, adapter: Path | None = None) -> ModelDescription:
        found = description.describe(folder, adapter=adapter)
        return replace(found, weights_bytes=found.weights_bytes // 4)

    async def work() -> None:
        pytest.MonkeyPatch().setattr(serve_models, "describe_model", wrong)
        models = await load_models(two_of(folders[:2], fit=2, kept=(NAMES[0],)))
        before = mx.get_active_memory()
        await models.load(NAMES[1])
        measured = models.status(NAMES[1]).n_bytes - POOL
        assert mx.get_active_memory() - before == pytest.approx(measured, rel=0.05)
        await models.close()

        most = TIER + 2 * POOL + measured + measured // 4
        tight = replace(two_of(folders[:2], kept=(NAMES[0],)), max_bytes=most)
        models = await load_models(tight)
        before = mx.get_active_memory()
        with pytest.raises(
            ModelLoadError, match=r"needs \d+ MiB .* next to \d+ MiB of pinned models"
        ):
            await models.load(NAMES[1])
        assert mx.get_active_memory() - before < measured // 4
        await models.close()

    run(work)


def test_collections_at_the_end_of_a_model_do_not_look_at_what_was_imported(
    folders: tuple[Path, ...],
) -> None:
    in_own_process("tests.integration.test_several_models:objects_after_a_load", *folders[:2])


def objects_after_a_load(*paths: str) -> None:
    """Most are frozen while models are loaded, and none afterwards."""
    folders = tuple(map(Path, paths))
    assert gc.get_freeze_count() == 0, "unlike in a process of tests (`tests/conftest.py`)"

    async def work() -> None:
        models = await load_models(two_of(folders[:2], loaded=2))
        await models.load(NAMES[1])
        assert len(gc.get_objects()) < gc.get_freeze_count() / 2
        await models.close()
        assert gc.get_freeze_count() == 0

    run(work)


def test_what_the_program_has_frozen_stays_frozen(folders: tuple[Path, ...]) -> None:
    async def work() -> None:
        frozen = gc.get_freeze_count()
        models = await load_models(two_of(folders[:2]))
        assert 0 < gc.get_freeze_count() <= frozen
        await models.close()
        assert 0 < gc.get_freeze_count() <= frozen

    run(work)


def test_a_model_whose_folder_goes_while_it_is_loaded_leaves_no_engine_behind(
    folders: tuple[Path, ...],
) -> None:
    in_own_process("tests.integration.test_several_models:memory_of_failing_loads", *folders)


def memory_of_failing_loads(*paths: str) -> None:
    """Each gives back what it took."""
    folders = tuple(map(Path, paths))
    weights = (folders[1] / "model.safetensors").stat().st_size

    def gone(*_: object, **__: object) -> None:
        raise FileNotFoundError("the folder is gone")

    async def work() -> None:
        models = await load_models(two_of(folders, fit=3))
        pytest.MonkeyPatch().setattr(description, "read_details", gone)
        before = mx.get_active_memory()
        for _ in range(3):
            with pytest.raises(ModelLoadError):
                await models.load(NAMES[1])
            # Its thread lets the engine go after the error is raised here, and leaves garbage.
            async with asyncio.timeout(60):
                while mx.get_active_memory() >= before + weights / 2:
                    await asyncio.sleep(0.01)
                    gc.collect()
        await models.close()

    run(work)


def test_a_server_that_stops_while_it_loads_ends_and_its_store_has_every_agent(
    folders: tuple[Path, ...], tmp_path: Path
) -> None:
    def settings() -> ModelsSettings:
        found = [served(one, tmp_path / "store") for one in folders]
        return ModelsSettings(found, max_bytes=TIER + 2 * (POOL + MIB))

    async def first() -> None:
        models = await load_models(settings())
        await ask(models.serving_of(), "ann", prompt_of(1, 1))
        waiting = asyncio.create_task(ask(models.serving_of(NAMES[1]), "bob", prompt_of(2, 0)))
        while models.status(NAMES[1]).state != "loading":
            await asyncio.sleep(0)
        await models.close()
        with pytest.raises(OverloadedError, match="stopping"):
            await waiting

    async def second() -> Usage:
        models = await load_models(settings())
        usage = (await ask(models.serving_of(), "ann", prompt_of(1, 2)))[1]
        await models.close()
        return usage

    run(first)
    assert run(second).cached >= len(prompt_of(1, 1))


def test_what_can_never_be_served_is_refused_at_the_start(folders: tuple[Path, ...]) -> None:
    def start(settings: ModelsSettings) -> None:
        async def work() -> ManagedModels:
            return await load_models(settings)

        run(work)

    with pytest.raises(InvalidRequestError, match=r"needs \d+ MiB .* at most the 4 MiB"):
        start(ModelsSettings([served(folders[0])], max_bytes=TIER + 4 * MIB))
    with pytest.raises(InvalidRequestError, match="two models have the name qwen3_coder"):
        start(two_of((folders[0], folders[0])))
    with pytest.raises(InvalidRequestError, match="--keep-model other: expected one of qwen3_c"):
        start(two_of(folders, kept=("other",)))
    with pytest.raises(ModelNotFoundError, match="no model folder"):
        start(two_of((folders[0], folders[0] / "nothing")))


# Models of the hub


@pytest.fixture
def hub(
    folders: tuple[Path, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Hub]:
    """A hub with one of the models, and an empty cache."""
    with running_hub() as found:
        use_hub(monkeypatch, found.url, tmp_path / "hub")
        found.add("org/new", folders[2])
        yield found


@pytest.mark.process
def test_a_model_of_the_hub_is_fetched_and_answers_as_it_does_alone(
    folders: tuple[Path, ...], hub: Hub
) -> None:
    async def work() -> None:
        expected = await ask_alone(folders[2])
        models = await load_models(two_of(folders[:1]))
        try:
            arrived: list[Arrived] = []

            def leave(one: Arrived) -> None:
                arrived.append(one)
                if one.n_bytes:
                    task.cancel()

            task = asyncio.create_task(models.fetch("org/new", leave))
            with pytest.raises(asyncio.CancelledError):
                await task
            with pytest.raises(ModelNotFoundError):
                models.status("org/new")
            arrived.clear()
            status = await models.fetch("org/new", arrived.append)
            assert (status.state, status.served.names) == ("unloaded", ("org/new",))
            sizes = [one.n_bytes for one in arrived]
            assert sizes == sorted(sizes)
            assert sizes[0] > 0, "it goes on from there"
            assert sizes[-1] == arrived[-1].total_bytes
            found = await ask(models.serving_of("org/new"), "a", prompt_of(1, 0))
            assert found[0] == expected
            asked_before = len(hub.ranges)
            await models.fetch("org/new", arrived.append)
            assert len(hub.ranges) == asked_before
            with pytest.raises(ModelNotFoundError):
                await models.fetch("org/nothing", arrived.append)
            for name in ("../etc", "org", "/no/model", "org/new/x", "a\0/b", ""):
                with pytest.raises((InvalidRequestError, ModelNotFoundError)):
                    await models.fetch(name, arrived.append)
        finally:
            await models.close()

    run(work)


@pytest.mark.process
def test_what_does_not_fit_is_not_fetched(folders: tuple[Path, ...], hub: Hub) -> None:
    hub.models["org/new"]["model.safetensors"] += bytes(3 * (POOL + MIB))

    async def work() -> None:
        models = await load_models(two_of(folders[:1]))
        try:
            with pytest.raises(InvalidRequestError, match="org/new does not fit: its weights"):
                await models.fetch("org/new", lambda _: None)
        finally:
            await models.close()

    run(work)
    assert hub.ranges == []


async def ask_alone(folder: Path) -> str:
    serving = await load_serving(served(folder))
    try:
        return (await ask(serving, "a", prompt_of(1, 0)))[0]
    finally:
        await serving.close()
