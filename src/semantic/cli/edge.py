"""Where errors leave the process: one line on stderr and an exit code, never a traceback.

Knows the branches of the error tree; not what a command does.

    0    done                          3    no room now: retry later or ask for less
    1    a check did not hold          4    a person must act
    2    change the request            70   a bug
                                       130  Ctrl-C
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import typer

from semantic.domain.errors import (
    AnswerError,
    CapacityError,
    OperatorError,
    RequestError,
    SemanticError,
)

EXIT_CHECK_FAILED = 1
EXIT_INTERRUPTED = 130

_EXIT_CODES: dict[type[SemanticError], int] = {
    AnswerError: EXIT_CHECK_FAILED,
    RequestError: 2,
    CapacityError: 3,
    OperatorError: 4,
}
_EXIT_BUG = 70
_SHOW_TRACEBACK = "SEMANTIC_TRACEBACK"


def exit_code(error: SemanticError) -> int:
    """The exit code of the error's branch of the tree."""
    return next(code for branch, code in _EXIT_CODES.items() if isinstance(error, branch))


def print_error(message: object) -> None:
    """One line on stderr, however many the message has."""
    typer.echo(f"error: {' '.join(str(message).split())}", err=True)


def print_notice(message: object) -> None:
    """One line on stderr about what is not as wished, while the command goes on."""
    typer.echo(" ".join(str(message).split()), err=True)


@contextmanager
def process_edge() -> Iterator[None]:
    """Turns what a command raises into an exit code."""
    try:
        yield
    except SemanticError as error:
        print_error(error)
        raise typer.Exit(exit_code(error)) from error
    except (typer.Exit, typer.Abort, typer.BadParameter, BrokenPipeError):
        raise  # typer's own, and a reader that went away: typer ends quietly then
    except Exception as error:
        if os.environ.get(_SHOW_TRACEBACK):
            raise
        print_error(f"{type(error).__name__}: {error} (a bug; {_SHOW_TRACEBACK}=1 shows where)")
        raise typer.Exit(_EXIT_BUG) from error
