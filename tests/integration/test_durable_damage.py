"""Whatever happens to the files of a store, or to the model: never a wrong token.

Real models, real files. After each damage every agent is asked again; its answer must be that
of plain mlx-lm, and what was lost is kept anew.
"""

from __future__ import annotations

import functools
import json
import os
import random
import shutil
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from semantic.adapters.stores.disk.block_file import HEADER_BYTES
from semantic.bootstrap import App, build_engine
from semantic.composition.engine_settings import Settings
from tests.support.durable import MIB, TINY_MEMORY, Asked, Durable, history, running, text
from tests.support.eight_bits import EIGHT
from tests.support.lanes import more
from tests.support.rig import Done

_EMBEDDED = Path(__file__).resolve().parents[2] / "src/semantic/models/semantic-tiny"
_PAGE = 4096
_SHARED = text(270, seed=1)
_PROMPTS = {
    ("ann", ""): (*_SHARED, *text(190, seed=2)),
    ("ben", ""): (*_SHARED, *text(190, seed=3)),
    ("ann", "x"): (*_SHARED, *text(190, seed=2)),
    ("cay", "x"): text(460, seed=4),
}
"""Two agents that begin alike, one of another tenant that is all alike, one that is its own."""

Who = tuple[str, str]
Damage = Callable[[Path, random.Random], None]


# A store to damage


@dataclass(frozen=True, slots=True)
class Saved:
    """A closed store with four agents, and what they said; `older` is it one turn before."""

    folder: Path
    older: Path
    past: dict[Who, tuple[int, ...]]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Saved]:
    """The store of an architecture, made once."""

    @functools.cache
    def make(architecture: str) -> Saved:
        root = tmp_path_factory.mktemp("saved")
        past: dict[Who, tuple[int, ...]] = {}
        ask_each(architecture, root / "store", _PROMPTS, past)
        shutil.copytree(root / "store", root / "older")
        ask_each(architecture, root / "store", onward(past, 100), past)
        return Saved(root / "store", root / "older", past)

    return make


def onward(past: dict[Who, tuple[int, ...]], n_more: int) -> dict[Who, tuple[int, ...]]:
    """One more turn of each agent."""
    return {who: (*tokens, *text(n_more, seed=n_more)) for who, tokens in past.items()}


def ask_each(
    architecture: str,
    folder: Path,
    prompts: dict[Who, tuple[int, ...]],
    past: dict[Who, tuple[int, ...]],
) -> None:
    """One turn of each agent; what it said goes to `past`."""
    with running(architecture, folder) as life:
        for (agent, tenant), prompt in prompts.items():
            done = life.ask(agent, prompt, 4, tenant=tenant)
            past[agent, tenant] = history(prompt, done)


# Damage


def block_files(folder: Path, part: str = "*") -> list[Path]:
    return sorted(path for path in (folder / "blocks").rglob(f"*.{part}") if path.is_file())


def manifest_files(folder: Path) -> list[Path]:
    return sorted(path for path in (folder / "agents").rglob("*.*") if path.is_file())


def flip(path: Path, draw: random.Random, start: int = 0, stop: int | None = None) -> None:
    """Flip one bit between these offsets."""
    data = bytearray(path.read_bytes())
    stop = len(data) if stop is None else min(stop, len(data))
    if start < stop:
        data[draw.randrange(start, stop)] ^= 1 << draw.randrange(8)
        path.write_bytes(data)


def flip_bodies(folder: Path, draw: random.Random) -> None:
    for path in block_files(folder):
        flip(path, draw, HEADER_BYTES)


def flip_headers(folder: Path, draw: random.Random) -> None:
    for path in block_files(folder):
        flip(path, draw, 0, HEADER_BYTES)


def flip_some(folder: Path, draw: random.Random) -> None:
    for path in (*block_files(folder), *manifest_files(folder)):
        if draw.random() < 0.3:
            flip(path, draw)


def rotate(files: list[Path]) -> None:
    """Each file gets the contents of the one before."""
    contents = [path.read_bytes() for path in files]
    for path, data in zip(files, contents[-1:] + contents[:-1], strict=True):
        path.write_bytes(data)


def rotate_blocks(folder: Path, draw: random.Random) -> None:
    for part in ("full", "window", "checkpoint"):
        files = block_files(folder, part)
        draw.shuffle(files)
        rotate(files)


def rotate_names(folder: Path, draw: random.Random) -> None:
    """As `rotate_blocks`, with files moved: they keep their dates and numbers."""
    files = block_files(folder, "full")
    draw.shuffle(files)
    for i, path in enumerate(files):
        path.rename(folder / f"moved-{i}")
    for i, path in enumerate(files[1:] + files[:1]):
        (folder / f"moved-{i}").rename(path)


def one_for_all(folder: Path, draw: random.Random) -> None:
    for part in ("full", "window", "checkpoint"):
        files = block_files(folder, part)
        for path in files[1:]:
            path.write_bytes(files[0].read_bytes())
    del draw


def bodies_of_others(folder: Path, draw: random.Random) -> None:
    """Right header, the body of another block of the same size."""
    del draw
    files = block_files(folder, "full")
    bodies = [path.read_bytes()[HEADER_BYTES:] for path in files]
    for path, own in zip(files, bodies, strict=True):
        other = next((body for body in bodies if len(body) == len(own) and body != own), own[::-1])
        path.write_bytes(path.read_bytes()[:HEADER_BYTES] + other)


def truncate(folder: Path, draw: random.Random) -> None:
    for path in block_files(folder):
        os.truncate(path, draw.randrange(path.stat().st_size or 1))


def empty(folder: Path, draw: random.Random) -> None:
    del draw
    for path in block_files(folder):
        os.truncate(path, 0)


def zero_tails(folder: Path, draw: random.Random) -> None:
    """The file is as long as it was, and the last pages never reached the drive."""
    for path in block_files(folder):
        size = path.stat().st_size
        pages = -(-size // _PAGE)
        os.truncate(path, draw.randrange(max(1, pages)) * _PAGE)
        os.truncate(path, size)


def lengthen(folder: Path, draw: random.Random) -> None:
    for path in block_files(folder):
        with path.open("ab") as file:
            file.write(draw.randbytes(draw.choice([1, 4, _PAGE])))


def delete_some(folder: Path, draw: random.Random) -> None:
    for path in block_files(folder):
        if draw.random() < 0.4:
            path.unlink()


def delete_part(part: str, folder: Path, draw: random.Random) -> None:
    del draw
    for path in block_files(folder, part):
        path.unlink()


def links_and_pipes(folder: Path, draw: random.Random) -> None:
    """Something else than a file stands in a block's place."""
    target = folder.parent / "elsewhere"
    target.write_bytes(block_files(folder)[0].read_bytes())
    for path in block_files(folder):
        data = path.read_bytes()
        path.unlink()
        match draw.randrange(4):
            case 0:
                path.symlink_to(target)
            case 1:
                os.mkfifo(path)
            case 2:
                os.link(target, path)
            case _:
                path.write_bytes(data)


def delete_index(folder: Path, draw: random.Random) -> None:
    del draw
    for path in folder.glob("index.sqlite*"):
        path.unlink()


def flip_index(folder: Path, draw: random.Random) -> None:
    for _ in range(40):
        flip(folder / "index.sqlite", draw)


def garbage_index(folder: Path, draw: random.Random) -> None:
    (folder / "index.sqlite").write_bytes(draw.randbytes(10_000))


def cut_index(folder: Path, draw: random.Random) -> None:
    path = folder / "index.sqlite"
    os.truncate(path, draw.randrange(1, path.stat().st_size))


def older_index(folder: Path, draw: random.Random) -> None:
    """A backup of the index alone was copied back."""
    delete_index(folder, draw)
    shutil.copy(folder.parent / "older" / "index.sqlite", folder / "index.sqlite")


def older_blocks(folder: Path, draw: random.Random) -> None:
    """A backup of the blocks alone was copied back."""
    del draw
    shutil.rmtree(folder / "blocks")
    shutil.copytree(folder.parent / "older" / "blocks", folder / "blocks")


def flip_manifests(folder: Path, draw: random.Random) -> None:
    for path in manifest_files(folder):
        flip(path, draw)


def rotate_manifests(folder: Path, draw: random.Random) -> None:
    del draw
    rotate(manifest_files(folder))


def older_manifests(folder: Path, draw: random.Random) -> None:
    """A backup of the agents alone was copied back; the newer files are gone."""
    del draw
    shutil.rmtree(folder / "agents")
    shutil.copytree(folder.parent / "older" / "agents", folder / "agents")


def older_manifests_as_newest(folder: Path, draw: random.Random) -> None:
    """The contents of the generation before under the newest one's name."""
    del draw
    by_agent: dict[str, Path] = {}
    for path in manifest_files(folder):
        before = by_agent.get(path.stem)
        if before is not None:
            path.write_bytes(before.read_bytes())
        by_agent[path.stem] = path


def no_manifests(folder: Path, draw: random.Random) -> None:
    del draw
    for path in manifest_files(folder):
        path.unlink()


COUNTED: dict[str, Damage] = {
    "bits in bodies": flip_bodies,
    "bits in headers": flip_headers,
    "blocks change places": rotate_blocks,
    "blocks change names": rotate_names,
    "one block in all places": one_for_all,
    "bodies of others": bodies_of_others,
    "truncated": truncate,
    "empty": empty,
    "zero tails": zero_tails,
    "too long": lengthen,
}
"""Nothing of it is reused by any agent."""

LOST: dict[str, Damage] = {
    "bits anywhere": flip_some,
    "some blocks gone": delete_some,
    "full blocks gone": functools.partial(delete_part, "full"),
    "window blocks gone": functools.partial(delete_part, "window"),
    "checkpoints gone": functools.partial(delete_part, "checkpoint"),
    "links and pipes": links_and_pipes,
    "older blocks": older_blocks,
}
"""Some of it may be reused."""

HARMLESS: dict[str, Damage] = {
    "no index": delete_index,
    "bits in the index": flip_index,
    "garbage for an index": garbage_index,
    "half an index": cut_index,
    "older index": older_index,
    "bits in manifests": flip_manifests,
    "manifests change places": rotate_manifests,
    "older manifests": older_manifests,
    "older manifests as newest": older_manifests_as_newest,
    "no manifests": no_manifests,
}
"""The blocks are all there, and all is reused."""


class Aftermath:
    """The agents of a saved store, asked again in a copy of it."""

    def __init__(self, architecture: str, saved: Saved, root: Path) -> None:
        self.architecture = architecture
        self.folder = root / "store"
        self.past = dict(saved.past)
        shutil.copytree(saved.folder, self.folder)
        shutil.copytree(saved.older, root / "older")

    @contextmanager
    def life(self) -> Iterator[Durable]:
        with running(self.architecture, self.folder, memory_bytes=TINY_MEMORY) as life:
            yield life

    def ask_everybody(self, life: Durable, n_more: int) -> dict[Who, Done]:
        """One more turn of all agents at once; each answer is right."""
        asked = [
            Asked(agent, prompt, 4, tenant)
            for (agent, tenant), prompt in onward(self.past, n_more).items()
        ]
        done = life.ask_all(asked)
        for one, end in zip(asked, done, strict=True):
            self.past[one.agent, one.tenant] = history(one.prompt, end)
        return dict(zip(self.past, done, strict=True))

    def require_healed(self) -> None:
        """What was lost is kept anew, and all of it is reused.

        Not at once: a damaged block behind a lost one is not read, so it is not known yet.
        """
        assert any(self._is_all_reused() for _ in range(3))

    def _is_all_reused(self) -> bool:
        with self.life() as life:
            before = {who: len(tokens) for who, tokens in self.past.items()}
            done = self.ask_everybody(life, 3)
            return {who: end.cached_tokens for who, end in done.items()} == before


_PACKED = f"gemma3 of 64{EIGHT}"
_HIT = (("llama", False), ("lfm2", True), (_PACKED, False), ("gemma3", True))
_ONLY_OF = {"window blocks gone": (_PACKED, False), "checkpoints gone": ("lfm2", True)}


def hits(kind: dict[str, Damage]) -> pytest.MarkDecorator:
    """Each damage, to the files of a model whose store is closed or open.

    By default each hits one of them, which has such files, in turn; in the thorough lane all.
    """
    found = []
    for i, (name, damage) in enumerate(kind.items()):
        usual = _ONLY_OF.get(name, _HIT[i % 3])
        for architecture, is_open in _HIT:
            marks = [] if (architecture, is_open) == usual else [pytest.mark.thorough]
            where = f"{name}-{architecture} {'open' if is_open else 'closed'}"
            found.append(pytest.param(architecture, is_open, damage, id=where, marks=marks))
    return pytest.mark.parametrize(("architecture", "is_open", "damage"), found)


few_architectures = pytest.mark.parametrize("architecture", ["gemma3", *more("llama", "lfm2")])


@hits(COUNTED)
def test_damaged_blocks_are_counted_and_computed_again(
    architecture: str, damage: Damage, is_open: bool, saved: Callable[[str], Saved], tmp_path: Path
) -> None:
    after = Aftermath(architecture, saved(architecture), tmp_path)
    if not is_open:
        damage(after.folder, random.Random(1))
    with after.life() as life:
        if is_open:
            damage(after.folder, random.Random(1))
        done = after.ask_everybody(life, 2)
        # Agents that run at once share what one of them has computed anew.
        assert all(end.match is not None and end.cached_tokens < 460 for end in done.values())
        assert life.counts()["damaged"] > 0
    after.require_healed()


@hits(LOST)
def test_lost_blocks_are_computed_again(
    architecture: str, damage: Damage, is_open: bool, saved: Callable[[str], Saved], tmp_path: Path
) -> None:
    after = Aftermath(architecture, saved(architecture), tmp_path)
    if not is_open:
        damage(after.folder, random.Random(1))
    with after.life() as life:
        if is_open:
            damage(after.folder, random.Random(1))
        after.ask_everybody(life, 2)
    after.require_healed()


@pytest.mark.parametrize(
    ("architecture", "damage"),
    [
        pytest.param(
            architecture,
            damage,
            id=f"{name}-{architecture}",
            marks=[] if architecture == _HIT[i % 3][0] else [pytest.mark.thorough],
        )
        for i, (name, damage) in enumerate(HARMLESS.items())
        for architecture in ("llama", "lfm2", _PACKED)
    ],
)
def test_without_index_or_manifests_all_blocks_are_still_found(
    architecture: str, damage: Damage, saved: Callable[[str], Saved], tmp_path: Path
) -> None:
    after = Aftermath(architecture, saved(architecture), tmp_path)
    damage(after.folder, random.Random(1))
    with after.life() as life:
        before = {who: len(tokens) for who, tokens in after.past.items()}
        done = after.ask_everybody(life, 2)
        assert {who: end.cached_tokens for who, end in done.items()} == before
    after.require_healed()


@pytest.mark.parametrize("seed", [3, *more(0, 1, 2, 4, 5)])
def test_all_kinds_of_damage_at_once_and_again(
    seed: int, saved: Callable[[str], Saved], tmp_path: Path
) -> None:
    draw = random.Random(seed)
    kinds = {**COUNTED, **LOST, **HARMLESS}
    after = Aftermath(draw.choice(["llama", "gemma3", "lfm2"]), saved("llama"), tmp_path)
    shutil.rmtree(after.folder)
    shutil.copytree(saved(after.architecture).folder, after.folder)
    after.past = dict(saved(after.architecture).past)
    for turn in range(3):
        kinds[draw.choice(list(kinds))](after.folder, draw)
        with after.life() as life:
            kinds[draw.choice(list(COUNTED))](after.folder, draw)
            after.ask_everybody(life, turn + 1)
            life.engine.flush()
            flip_some(after.folder, draw)
            after.ask_everybody(life, turn + 1)


# Tenants


@few_architectures
def test_tenants_share_no_block(architecture: str, tmp_path: Path) -> None:
    prompt = text(700, seed=1)
    ends = {}
    with running(architecture, tmp_path / "store") as life:
        for tenant in ("x", "y", ""):
            ends[tenant] = life.ask("ann", prompt, tenant=tenant)
            assert ends[tenant].cached_tokens == 0
    with running(architecture, tmp_path / "store") as again:
        assert again.ask("new", (*prompt, 1), tenant="z").cached_tokens == 0
        for tenant, end in ends.items():
            past = history(prompt, end)
            assert again.ask("ann", (*past, 1), tenant=tenant).cached_tokens == len(past)


# Another model under the same name


@contextmanager
def real_engine(model: Path, store: Path) -> Iterator[App]:
    app = build_engine(
        Settings(
            model=str(model),
            use_disk=True,
            store=store,
            disk_bytes=64 * MIB,
            memory_bytes=MIB,
            pool_blocks=200,
        )
    )
    try:
        yield app
    finally:
        app.engine.close()


def resume(model: Path, store: Path) -> tuple[Done, bool]:
    """The answer to a prompt that was asked before, and whether the agent is known."""
    with real_engine(model, store) as app:
        known = app.engine.manifest("ann") is not None
        app.engine.submit("ann", text(400, seed=1), max_tokens=8)
        (done,) = app.engine.step()
        return done, known


def add_to_one_weight(folder: Path) -> None:
    """Add 1e-3 to one number of one tensor; all else stays byte for byte."""
    path = folder / "model.safetensors"
    data = bytearray(path.read_bytes())
    (n_header,) = struct.unpack_from("<Q", data)
    header = json.loads(data[8 : 8 + n_header])
    name = next(name for name in header if name.endswith("q_proj.weight"))
    assert header[name]["dtype"] == "F16"
    at = 8 + n_header + header[name]["data_offsets"][0]
    (value,) = struct.unpack_from("<e", data, at)
    struct.pack_into("<e", data, at, value + 1e-3)
    assert struct.unpack_from("<e", data, at) != (value,)
    path.write_bytes(data)


def change_text(name: str, old: str, new: str, folder: Path) -> None:
    path = folder / name
    before = path.read_text(encoding="utf-8")
    assert old in before
    path.write_text(before.replace(old, new, 1), encoding="utf-8")


CHANGES: dict[str, Callable[[Path], None]] = {
    "weights": add_to_one_weight,
    "config": functools.partial(change_text, "config.json", "1e-05", "1.1e-05"),
    "tokenizer": functools.partial(change_text, "tokenizer.json", "{", "{ "),
    "tokenizer config": functools.partial(change_text, "tokenizer_config.json", "{", "{ "),
    "template": lambda folder: change_text("chat_template.jinja", "", " ", folder),
}


@pytest.fixture(scope="module")
def answered(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Done]:
    """A store in which an agent of the embedded model has answered."""
    root = tmp_path_factory.mktemp("answered")
    shutil.copytree(_EMBEDDED, root / "semantic-tiny")
    done, known = resume(root / "semantic-tiny", root / "store")
    assert not known
    assert done.cached_tokens == 0
    return root / "store", done


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
def test_a_changed_model_of_the_same_name_finds_nothing(
    change: Callable[[Path], None], answered: tuple[Path, Done], tmp_path: Path
) -> None:
    model, store = tmp_path / "semantic-tiny", tmp_path / "store"
    shutil.copytree(_EMBEDDED, model)
    shutil.copytree(answered[0], store)
    change(model)
    done, known = resume(model, store)
    assert (done.cached_tokens, known) == (0, False)
    done, known = resume(model, store)
    assert (done.cached_tokens, known) == (399, True), "its own"


def test_the_same_model_in_another_folder_finds_all(
    answered: tuple[Path, Done], tmp_path: Path
) -> None:
    shutil.copytree(_EMBEDDED, tmp_path / "renamed")
    shutil.copytree(answered[0], tmp_path / "store")
    done, known = resume(tmp_path / "renamed", tmp_path / "store")
    assert (done.cached_tokens, known) == (399, True)
    assert done.tokens == answered[1].tokens
