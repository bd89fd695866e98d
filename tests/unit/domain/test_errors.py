"""The tree drawn in the module's docstring is the tree of the classes."""

from __future__ import annotations

import inspect
import re

import pytest

from semantic.domain import errors

_LINE = re.compile(r"^ {4}(?P<indent>[ │├└─]*)(?P<name>[A-Z]\w+Error)(?P<rest>.*)$")


def drawn_parents() -> dict[str, str | None]:
    """Each class in the drawing, and the class it hangs from."""
    path: list[str] = []
    parents: dict[str, str | None] = {}
    for line in (errors.__doc__ or "").splitlines():
        match = _LINE.match(line)
        if match is None:
            continue
        depth = len(match["indent"]) // 4
        del path[depth:]
        parents[match["name"]] = path[-1] if path else None
        path.append(match["name"])
    return parents


def error_classes() -> dict[str, type[BaseException]]:
    return {
        name: found
        for name, found in inspect.getmembers(errors, inspect.isclass)
        if found.__module__ == errors.__name__ and issubclass(found, BaseException)
    }


def test_the_drawing_shows_every_class_and_no_other() -> None:
    assert drawn_parents().keys() == error_classes().keys()


def test_every_class_derives_as_drawn() -> None:
    classes = error_classes()
    ours = {
        name: [base.__name__ for base in found.__bases__ if base in classes.values()]
        for name, found in classes.items()
    }
    assert ours == {name: [up] if up else [] for name, up in drawn_parents().items()}


@pytest.mark.parametrize(
    ("error", "builtin"),
    [
        (errors.InvalidRequestError, ValueError),
        (errors.ModelNotFoundError, LookupError),
        (errors.CacheReconstructionError, ValueError),
        (errors.PoolExhaustedError, ValueError),
        (errors.UnsupportedModelError, NotImplementedError),
        (errors.BackendError, RuntimeError),
        (errors.IntegrityError, RuntimeError),
    ],
)
def test_a_caller_without_this_module_can_catch_the_builtin(
    error: type[errors.SemanticError], builtin: type[Exception]
) -> None:
    assert issubclass(error, builtin)


def test_every_error_says_when_it_happens() -> None:
    assert [name for name, found in error_classes().items() if not found.__doc__] == []


def test_every_leaf_says_what_the_caller_must_do_next() -> None:
    groups = (
        errors.RequestError, errors.CapacityError, errors.AnswerError, errors.OperatorError
    )  # fmt: skip
    leaves = [c for c in error_classes().values() if not c.__subclasses__()]
    assert len(leaves) >= 7
    assert [c for c in leaves if sum(issubclass(c, group) for group in groups) != 1] == []
