"""What a served model is called: its own name is shown, its path is accepted."""

from __future__ import annotations

from pathlib import Path

import pytest

from semantic.composition.engine_settings import Settings
from semantic.composition.named_models import model_name
from semantic.serve import ServeSettings, served_names

SNAPSHOT = "/srv/huggingface/hub/models--org--Some-7B/snapshots/0123abcd"


@pytest.mark.parametrize(
    ("model", "name"),
    [
        ("semantic-tiny", "semantic-tiny"),
        ("org/Some-7B", "org/Some-7B"),
        ("/models/Some-7B", "Some-7B"),
        ("/models/Some-7B/", "Some-7B"),
        ("/models/x/../Some-7B", "Some-7B"),
        ("~/Some-7B", "Some-7B"),
        ("~no-such-user/Some-7B", "Some-7B"),
        ("./Some-7B", "Some-7B"),
        (SNAPSHOT, "org/Some-7B"),
        ("/", "model"),
        ("/models/a\nb", "model"),
        ("/models/\udc80", "model"),
    ],
)
def test_a_folder_has_its_own_name(model: str, name: str) -> None:
    assert model_name(model) == name


def test_a_folder_that_looks_like_a_hub_id_is_a_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "models" / "Some-7B").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert model_name("models/Some-7B") == "Some-7B"
    names, aliases = served_names(ServeSettings(Settings("models/Some-7B")))
    assert names == ("Some-7B", "default")
    assert aliases == {"default_model", "models/Some-7B", str(tmp_path / "models" / "Some-7B")}


def test_given_names_are_listed_and_the_others_accepted() -> None:
    settings = ServeSettings(Settings("/models/Some-7B"), names=("chat", "chat", "small"))
    assert served_names(settings) == (
        ("chat", "small", "default"),
        frozenset({"Some-7B", "/models/Some-7B", "default_model"}),
    )


def test_a_client_of_mlx_lm_means_the_first_model() -> None:
    """The lists do not show the name."""
    first = served_names(ServeSettings())
    assert first == (("semantic-tiny", "default"), frozenset({"default_model"}))
    assert served_names(ServeSettings(is_first=False)) == (("semantic-tiny",), frozenset())
    own = served_names(ServeSettings(names=("default_model",)))
    assert own == (("default_model", "default"), frozenset({"semantic-tiny"}))
