"""Short names of models: written whole or not at all, the user's before those of a server."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from semantic.adapters.hub.aliases import default_file, read_aliases, remove_alias, set_alias
from semantic.composition import named_models
from semantic.domain.errors import InvalidRequestError, OperatorError


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "settings" / "models.toml"


def test_a_name_is_there_until_it_is_forgotten(file: Path) -> None:
    assert read_aliases(file).all() == {}
    set_alias("coder", "org/Coder-7B", file=file)
    set_alias("coder", "org/Coder-8B", file=file)
    set_alias("two words", "/models/other", file=file)
    assert read_aliases(file).all() == {"coder": "org/Coder-8B", "two words": "/models/other"}
    assert remove_alias("coder", file)
    assert not remove_alias("coder", file)
    assert read_aliases(file).all() == {"two words": "/models/other"}


def test_the_users_name_goes_before_a_servers(file: Path) -> None:
    set_alias("coder", "org/Mine", file=file)
    set_alias("coder", "org/Served", "served", file=file)
    set_alias("chat", "org/Served", "served", file=file)
    assert read_aliases(file).all() == {"coder": "org/Mine", "chat": "org/Served"}
    assert remove_alias("coder", file)
    assert read_aliases(file).all() == {"chat": "org/Served"}


def test_what_the_user_wrote_beside_the_names_stays(file: Path) -> None:
    file.parent.mkdir()
    file.write_text("# mine\n[aliases]\na = 'org/a'  # the small one\n")
    set_alias("b", "org/b", file=file)
    assert file.read_text() == "# mine\n[aliases]\na = 'org/a'  # the small one\nb = \"org/b\"\n"


@pytest.mark.parametrize("name", ["", "a/b", ".hidden", "~me", "-x", " x", "a\nb", "a" * 201])
def test_what_could_be_a_path_an_option_or_a_hub_id_is_no_name(file: Path, name: str) -> None:
    with pytest.raises(InvalidRequestError, match="an alias must be"):
        set_alias(name, "org/a", file=file)
    assert not file.exists()


@pytest.mark.parametrize(
    "text", ["[aliases", "[aliases]\na = 1\n", "aliases = 3\n", "[others]\na = 'x'\n", "\udcff"]
)
def test_a_file_of_another_form_is_refused_and_left_as_it_is(file: Path, text: str) -> None:
    file.parent.mkdir()
    file.write_text(text, errors="surrogateescape")
    before = file.read_bytes()
    with pytest.raises(InvalidRequestError, match=str(file)):
        read_aliases(file)
    with pytest.raises(InvalidRequestError, match=str(file)):
        set_alias("b", "org/b", file=file)
    assert file.read_bytes() == before


@pytest.mark.process
def test_programs_that_write_at_once_lose_no_name(file: Path) -> None:
    names = [f"name-{i}" for i in range(12)]
    threads = [
        threading.Thread(target=set_alias, args=(name, "org/a"), kwargs={"file": file})
        for name in names
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(read_aliases(file).all()) == sorted(names)


def test_a_write_that_fails_changes_nothing(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    set_alias("a", "org/a", file=file)
    before = file.read_bytes()

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OperatorError, match="No space left on device"):
        set_alias("b", "org/b", file=file)
    assert file.read_bytes() == before
    assert list(file.parent.iterdir()) == [file]


def test_a_link_stays_one(file: Path, tmp_path: Path) -> None:
    file.parent.mkdir()
    file.symlink_to(tmp_path / "real.toml")
    set_alias("a", "org/a", file=file)
    assert file.is_symlink()
    assert read_aliases(tmp_path / "real.toml").all() == {"a": "org/a"}


def test_a_folder_goes_before_an_alias_and_a_hub_id_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_alias("coder", "org/Coder-7B")
    assert named_models.model_of("coder") == "org/Coder-7B"
    assert [
        named_models.model_of(one) for one in ("org/coder", "./coder", "semantic-tiny", "")
    ] == ["org/coder", "./coder", "semantic-tiny", ""]
    (tmp_path / "coder").mkdir()
    monkeypatch.chdir(tmp_path)
    assert named_models.model_of("coder") == "coder"


def test_names_of_a_server_are_remembered_but_for_those_of_the_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "folder").mkdir()
    monkeypatch.chdir(tmp_path)
    set_alias("mine", "org/Mine")
    named_models.remember_served("folder", ["mine", "a/b", "semantic-tiny", "chat"])
    assert read_aliases().all() == {"mine": "org/Mine", "chat": str(tmp_path / "folder")}
    named_models.remember_served("mine", ["chat"])
    assert read_aliases().all()["chat"] == "org/Mine"


def test_a_server_without_names_reads_and_writes_nothing() -> None:
    default_file().parent.mkdir(parents=True)
    default_file().write_text("no TOML")
    named_models.remember_served("org/Model", ())
    assert default_file().read_text() == "no TOML"


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("semantic-tinny", "semantic-tiny"),
        ("Qwen3-8B-4bit", "org/Qwen3-8B-4bit"),
        ("orgg/qwen3-8b-4bit", "org/Qwen3-8B-4bit"),
        ("codr", "coder"),
        ("entirely-different", None),
        ("coder", "qwen3-coder"),  # a known model: the alias itself is no suggestion
    ],
)
def test_a_similar_name_is_one_that_is_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, meant: str | None
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    (tmp_path / "models--org--Qwen3-8B-4bit").mkdir()
    set_alias("coder", "org/Coder-7B")
    assert named_models.similar_model(name) == meant
