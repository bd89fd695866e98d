"""Turns errors into one line on stderr and an exit code, never a traceback.

0    success                       3    out of capacity: retry later or request less
1    a check failed                4    the operator must act
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
    """Return the exit code for the kind of the error."""
    return next(code for branch, code in _EXIT_CODES.items() if isinstance(error, branch))


def print_error(message: object) -> None:
    """Print an error on stderr, on one line."""
    typer.echo(f"error: {' '.join(str(message).split())}", err=True)


def print_notice(message: object) -> None:
    """Print a notice on stderr, on one line."""
    typer.echo(" ".join(str(message).split()), err=True)


@contextmanager
def process_edge() -> Iterator[None]:
    """Print an exception of the `with` block, and end the process with its exit code."""
    try:
        yield
    except SemanticError as error:
        print_error(error)
        raise typer.Exit(exit_code(error)) from error
    except (typer.Exit, typer.Abort, typer.BadParameter, BrokenPipeError):
        raise  # handled by typer; a closed pipe ends the program silently
    except Exception as error:
        if os.environ.get(_SHOW_TRACEBACK):
            raise
        print_error(f"{type(error).__name__}: {error} (a bug; {_SHOW_TRACEBACK}=1 shows where)")
        raise typer.Exit(_EXIT_BUG) from error
