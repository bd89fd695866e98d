"""What can be wrong with a file of the store, apart from what the system says about it."""

from __future__ import annotations


class DamagedError(Exception):
    """A file does not hold what its name promises; the message is the kind of damage."""

    @property
    def kind(self) -> str:
        return str(self)


class NewerFormatError(Exception):
    """A file was written by a later version; it is left alone."""


class MismatchError(Exception):
    """A file is sound but not what was asked for; the message names the field."""
