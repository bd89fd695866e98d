"""Downloads from a hub: nothing is lost by an interruption, and nothing damaged gets a name."""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest

from semantic.adapters.hub import download
from semantic.adapters.hub.hub_cache import (
    cached_models,
    complete_folder,
    listed_sizes,
    remove_cached,
)
from semantic.adapters.hub.remote import look_up, remote_config
from semantic.domain.errors import InvalidRequestError, ModelNotFoundError, OperatorError
from tests.support.model_hub import Hub, is_large, name_of, running_hub, use_hub

pytestmark = pytest.mark.process

PATTERNS = ["*.json", "*.safetensors"]
WEIGHTS = "model.safetensors"
_CHUNK = 1 << 10


class InterruptionError(Exception):
    """What ends a download in the middle."""


@pytest.fixture(scope="module")
def server() -> Iterator[Hub]:
    with running_hub() as hub:
        yield hub


@pytest.fixture
def hub(server: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Hub:
    """A hub with one model, and an empty cache."""
    use_hub(monkeypatch, server.url, tmp_path / "hub")
    monkeypatch.setattr("huggingface_hub.constants.DOWNLOAD_CHUNK_SIZE", _CHUNK)
    server.restart()
    server.models["org/tiny"] = {
        ".gitattributes": b"*.safetensors filter=lfs\n",
        "config.json": b"{}",
        "notes.md": b"not for a model",
        WEIGHTS: Random(1).randbytes(10 * _CHUNK),
        "second.safetensors": Random(2).randbytes(3 * _CHUNK),
    }
    return server


def pull(hub_id: str = "org/tiny", stop_after: int | None = None) -> tuple[Path, int]:
    """Download a model; its folder and the bytes that arrived."""
    arrived = 0

    def count(n_bytes: int) -> None:
        nonlocal arrived
        arrived += n_bytes
        if stop_after is not None and arrived >= stop_after:
            raise InterruptionError

    folder = download.pull(look_up(hub_id, PATTERNS), PATTERNS, count)
    return folder, arrived


def only_weights(hub: Hub, n_chunks: int = 10, seed: int = 3) -> bytes:
    """Leave one large file in the model, so that the order of bytes is known."""
    data = Random(seed).randbytes(n_chunks * _CHUNK)
    hub.models["org/tiny"] = {"config.json": b"{}", WEIGHTS: data}
    return data


def blob(hub: Hub, path: str = WEIGHTS) -> Path:
    """Where the bytes of a file are in the cache."""
    (model,) = cached_models()
    return model.folder.parents[1] / "blobs" / name_of(path, hub.models["org/tiny"][path])


def test_what_the_hub_says_is_known_before_anything_is_fetched(hub: Hub, tmp_path: Path) -> None:
    model = look_up("org/tiny", PATTERNS)
    assert [file.path for file in model.files] == ["config.json", WEIGHTS, "second.safetensors"]
    assert (model.n_bytes, model.weights_bytes) == (13 * _CHUNK + 2, 13 * _CHUNK)
    assert model.commit == hub.commit
    with remote_config(model) as folder:
        assert (folder / "config.json").read_bytes() == b"{}"
    assert not folder.exists()
    assert not (tmp_path / "hub").exists()
    assert download.missing_bytes(model) == model.n_bytes


@pytest.mark.parametrize(
    "said",
    [
        {"lfs": {"oid": "../../../precious", "size": 9, "pointerSize": 130}},
        {"lfs": {"oid": "a" * 63, "size": 9, "pointerSize": 130}},
        {"oid": "../../../precious"},
        {"path": "../../../precious.safetensors"},
        {"path": "/precious.safetensors"},
    ],
)
def test_names_that_the_hub_gives_are_no_paths_out_of_the_cache(
    said: dict[str, object], hub: Hub, tmp_path: Path
) -> None:
    precious = tmp_path / "precious"
    precious.write_bytes(b"of a user")
    only_weights(hub)
    pull()
    hub.said[WEIGHTS] = said
    for _ in range(2):
        with pytest.raises(OperatorError, match="hexadecimal hashes; use another hub"):
            download.drop_damaged(look_up("org/tiny", PATTERNS))
    assert precious.read_bytes() == b"of a user"
    hub.said.clear()
    hub.commit = "../../main"
    with pytest.raises(OperatorError, match="sent no commit"):
        look_up("org/tiny", PATTERNS)


def test_a_model_is_whole_and_each_byte_was_counted(hub: Hub) -> None:
    folder, arrived = pull()
    wanted = {k: v for k, v in hub.models["org/tiny"].items() if Path(k).suffix not in ("", ".md")}
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == wanted
    assert arrived == sum(map(len, wanted.values()))
    assert complete_folder("org/tiny", PATTERNS) == folder
    hub.ranges.clear()
    assert pull() == (folder, 0)
    assert hub.ranges == []


def test_an_interrupted_file_goes_on_where_it_was(hub: Hub) -> None:
    data = only_weights(hub)
    with pytest.raises(InterruptionError):
        pull(stop_after=4 * _CHUNK)
    assert complete_folder("org/tiny", PATTERNS) is None
    kept = 10 * _CHUNK - download.missing_bytes(look_up("org/tiny", PATTERNS))
    assert 3 * _CHUNK <= kept < 10 * _CHUNK
    (model,) = cached_models()
    assert model.unfinished_bytes == kept
    assert listed_sizes(model, ["*.safetensors"]) == {WEIGHTS: 10 * _CHUNK}
    folder, arrived = pull()
    assert (folder / WEIGHTS).read_bytes() == data
    assert arrived == 10 * _CHUNK - kept
    assert hub.ranges == [None, f"bytes={kept}-"]
    assert cached_models()[0].unfinished_bytes == 0


def test_a_server_that_knows_no_ranges_sends_the_file_again(hub: Hub) -> None:
    data = only_weights(hub)
    with pytest.raises(InterruptionError):
        pull(stop_after=4 * _CHUNK)
    missing = download.missing_bytes(look_up("org/tiny", PATTERNS))
    hub.without_ranges = True
    folder, arrived = pull()
    assert (folder / WEIGHTS).read_bytes() == data
    assert arrived == missing


def test_what_arrives_damaged_gets_no_name(hub: Hub) -> None:
    data = only_weights(hub)
    hub.corrupt.add(WEIGHTS)
    with pytest.raises(OperatorError, match=r"model.safetensors of 'org/tiny' arrived damaged"):
        pull()
    assert not blob(hub).exists()
    assert complete_folder("org/tiny", PATTERNS) is None
    hub.corrupt.clear()
    folder, arrived = pull()
    assert (folder / WEIGHTS).read_bytes() == data
    assert arrived == len(data)


def test_a_small_file_that_arrives_damaged_is_fetched_again(
    hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    only_weights(hub)
    with monkeypatch.context() as patch:
        patch.setattr(
            "tests.support.model_hub.name_of", lambda path, _: "f" * (64 if is_large(path) else 40)
        )
        with pytest.raises(OperatorError, match=r"config.json of 'org/tiny' arrived damaged"):
            pull()
    folder, _ = pull()
    assert (folder / "config.json").read_bytes() == b"{}"


def test_a_file_that_was_damaged_on_the_disk_is_found_and_fetched_again(hub: Hub) -> None:
    data = only_weights(hub)
    folder, _ = pull()
    blob(hub).write_bytes(bytes(len(data)))
    model = look_up("org/tiny", PATTERNS)
    assert download.missing_bytes(model) == 0
    assert download.drop_damaged(model) == [WEIGHTS]
    assert download.drop_damaged(model) == []
    assert pull() == (folder, len(data))
    assert (folder / WEIGHTS).read_bytes() == data


def test_a_file_of_another_size_is_fetched_again(hub: Hub) -> None:
    data = only_weights(hub)
    folder, _ = pull()
    blob(hub).write_bytes(data[:-1])
    blob(hub).with_name(f"{blob(hub).name}.incomplete").write_bytes(bytes(len(data) + 1))
    assert download.missing_bytes(look_up("org/tiny", PATTERNS)) == len(data)
    pull()
    assert (folder / WEIGHTS).read_bytes() == data


def test_an_interrupted_update_leaves_the_model_that_was_there(hub: Hub) -> None:
    before = only_weights(hub)
    folder, _ = pull()
    after = only_weights(hub, seed=4)
    hub.commit = "b" * 40
    with pytest.raises(InterruptionError):
        pull(stop_after=4 * _CHUNK)
    assert complete_folder("org/tiny", PATTERNS) == folder
    assert (folder / WEIGHTS).read_bytes() == before
    newer, _ = pull()
    assert complete_folder("org/tiny", PATTERNS) == newer != folder
    assert (newer / WEIGHTS).read_bytes() == after


def test_two_programs_do_not_write_one_file(hub: Hub) -> None:
    only_weights(hub)
    with pytest.raises(InterruptionError):
        pull(stop_after=4 * _CHUNK)
    partial = next(blob(hub).parent.glob("*.incomplete"))
    with partial.open("rb") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(OperatorError, match="another program is downloading model"):
            pull()
    pull()


def test_a_key_is_not_sent_to_where_the_hub_redirects(
    hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    pull()
    assert hub.authorizations == [None, None]


@pytest.mark.usefixtures("hub")
def test_a_disk_without_room_is_one_error_before_the_download(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = look_up("org/tiny", PATTERNS)
    download.require_space(model)
    monkeypatch.setattr("shutil.disk_usage", lambda _: _Usage())
    with pytest.raises(OperatorError, match=r"'org/tiny' needs 13314 more bytes in .* has 100"):
        download.require_space(model)


class _Usage:
    free = 100


@pytest.mark.parametrize(
    ("hub_id", "error", "words"),
    [
        ("org/none", ModelNotFoundError, "has no model 'org/none'"),
        ("org/../x", InvalidRequestError, "is not a hub id"),
        ("a b", InvalidRequestError, "is not a hub id"),
    ],
)
@pytest.mark.usefixtures("hub")
def test_what_the_hub_does_not_have_is_one_line(
    hub_id: str, error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words) as raised:
        look_up(hub_id, PATTERNS)
    assert "\n" not in str(raised.value)


@pytest.mark.usefixtures("hub")
def test_no_network_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(OperatorError, match=r"^no connection to the hub at http://127.0.0.1:9: "):
        look_up("org/tiny", PATTERNS)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(OperatorError, match=r"HF_HUB_OFFLINE is set$"):
        look_up("org/tiny", PATTERNS)


def test_a_model_is_deleted_with_what_was_begun_and_no_other_is(hub: Hub) -> None:
    hub.models["org/other"] = dict(hub.models["org/tiny"])
    kept, _ = pull("org/other")
    data = only_weights(hub)
    with pytest.raises(InterruptionError):
        pull(stop_after=4 * _CHUNK)
    unfinished = {model.hub_id: model.unfinished_bytes for model in cached_models()}["org/tiny"]
    assert remove_cached("org/tiny", dry_run=True) == unfinished + 2
    pull()
    assert remove_cached("org/tiny", dry_run=True) == len(data) + 2
    assert [model.hub_id for model in cached_models()] == ["org/other", "org/tiny"]
    assert remove_cached("org/tiny") == len(data) + 2
    assert [model.hub_id for model in cached_models()] == ["org/other"]
    assert complete_folder("org/other", PATTERNS) == kept
    with pytest.raises(ModelNotFoundError, match="'org/tiny' is not in the hub's cache"):
        remove_cached("org/tiny")


def test_a_cache_that_is_not_there_has_no_models(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "none"))
    assert cached_models() == ()
    assert complete_folder("org/tiny", PATTERNS) is None
