"""What clang says of source text that another compiler will get."""

from __future__ import annotations

import functools

from clang import cindex  # type: ignore[import-untyped]


@functools.cache
def errors_of(text: str, file: str, *arguments: str) -> tuple[str, ...]:
    """Each error with the line it says it of; many launches have the same text."""
    parsed = cindex.Index.create().parse(file, args=arguments, unsaved_files=[(file, text)])
    lines = ["", *text.splitlines()]  # clang counts from 1; 0 is nowhere
    errors: list[str] = []
    for found in parsed.diagnostics:
        if found.severity >= cindex.Diagnostic.Error:
            at = found.location.line
            errors.append(f"{found.spelling}: {lines[at].strip() if at < len(lines) else ''}")
    return tuple(errors)
