"""The fleet's secret: what file is one, and that stores with it agree on their tenants."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest

from semantic.adapters.stores.disk import DiskStore
from semantic.composition.engine_settings import Settings
from semantic.composition.process_stores import FLEET_VARIABLE, open_store, read_fleet_secret
from semantic.domain.block_hash import Scope, tenant_tag
from semantic.domain.errors import InvalidRequestError
from tests.support.store_blocks import block, chain, header, keys, manifest, saved_agents

DATA = bytes(range(40))
ROOM = 1 << 24


def written(folder: Path, data: bytes = DATA, mode: int = 0o600, name: str = "secret") -> Path:
    path = folder / name
    path.write_bytes(data)
    path.chmod(mode)
    return path


def test_a_secret_is_32_bytes_that_its_file_decides(tmp_path: Path) -> None:
    secret = read_fleet_secret(written(tmp_path))
    assert len(secret) == 32
    assert secret not in DATA
    assert read_fleet_secret(written(tmp_path, DATA + b"\r\n", 0o640)) == secret
    assert read_fleet_secret(written(tmp_path, DATA[::-1])) != secret


@pytest.mark.parametrize(
    ("data", "mode", "expected"),
    [
        (DATA[:31], 0o600, "expected 32 to 4096"),
        (DATA[:31] + b"\n", 0o600, "expected 32 to 4096"),
        (bytes(64), 0o600, "expected 32 to 4096"),
        (Random(1).randbytes(2049).hex().encode(), 0o600, "expected 32 to 4096"),
        (DATA, 0o604, "mode 0604"),
        (DATA, 0o660, "mode 0660"),
    ],
)
def test_any_other_file_is_refused_and_not_quoted(
    tmp_path: Path, data: bytes, mode: int, expected: str
) -> None:
    with pytest.raises(InvalidRequestError, match=expected) as refused:
        read_fleet_secret(written(tmp_path, data, mode))
    assert data.hex() not in str(refused.value)
    assert repr(data) not in str(refused.value)


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequestError, match="cannot read"):
        read_fleet_secret(tmp_path / "none")
    with pytest.raises(InvalidRequestError, match="is not a file"):
        read_fleet_secret(tmp_path)


def test_stores_with_one_secret_give_a_tenant_one_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On disk and in memory, by the setting and by the environment."""
    path = written(tmp_path)
    settings = Settings(disk_bytes=ROOM, memory_bytes=ROOM, fleet_secret=path)
    secrets = []
    for folder in ("a", "b", None):
        at = None if folder is None else tmp_path / folder
        store = open_store(
            Settings(
                use_disk=at is not None,
                store=at,
                disk_bytes=settings.disk_bytes,
                memory_bytes=settings.memory_bytes,
                fleet_secret=path,
            )
        )
        secrets.append(store.secret)
        store.close()
    monkeypatch.setenv(FLEET_VARIABLE, str(path))
    store = open_store(Settings(memory_bytes=ROOM))
    assert {*secrets, store.secret} == {read_fleet_secret(path)}
    store.close()


def test_a_new_secret_finds_nothing_and_the_old_one_finds_all_again(tmp_path: Path) -> None:
    """Rotation is cold: what was stored stays until it is evicted, and no other tenant finds it."""

    def scope_with(secret: bytes) -> Scope:
        return Scope(b"n" * 32, tenant_tag(secret, "tenant"))

    old, new = bytes(range(32)), bytes(range(1, 33))
    [link] = chain(256, scope=scope_with(old))
    for secret, finds in ((old, False), (new, False), (old, True), (None, False)):
        with_it = DiskStore.open(tmp_path / "store", ROOM, secret=secret)
        own = scope_with(with_it.secret)
        [mine] = chain(256, scope=own)
        assert bool(with_it.find(keys([mine]))) == finds
        assert (with_it.manifest(own, "a") is not None) == finds
        if secret == old and not finds:
            assert with_it.put(block(link))
            assert with_it.save(manifest("a", 256, scope=own))
        if finds:
            assert with_it.read(header(mine)) == block(link).body
        assert len(saved_agents(with_it)) == 1
        with_it.close()
