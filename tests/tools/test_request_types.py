"""The written request types are those of the SDKs, and serving imports no SDK."""

from __future__ import annotations

import importlib
import subprocess
import sys
from collections.abc import Mapping, Sequence

import pytest
from pydantic import TypeAdapter

from tools.request_types import WIRES, Root, Wire

pytestmark = pytest.mark.process

Schema = object
"""A core schema of pydantic, or a part of one."""

Definitions = Mapping[str, Schema]
"""Schemas that others refer to."""

# Names, and how a validated value would be written again.
NO_RULES = {"cls", "cls_name", "cls_repr", "config", "metadata", "ref", "serialization"}


def rules(schema: Schema, known: Definitions) -> Schema:
    """What of a core schema decides which requests are accepted, and with which first error."""
    if isinstance(schema, dict):
        return _rules_of_dict(schema, known)
    if isinstance(schema, Sequence) and not isinstance(schema, str):
        return [rules(one, known) for one in schema]
    return getattr(schema, "__qualname__", schema)


def _rules_of_dict(schema: Mapping[str, Schema], known: Definitions) -> Schema:
    match schema:
        case {"type": "definitions", "definitions": list(named)}:
            return rules(schema["schema"], {one["ref"]: one for one in named})
        case {"type": "definition-ref", "schema_ref": str(name)}:
            return rules(known[name], known)
        case {"type": "generator"}:
            return "unchecked elements"
        case {"type": "literal", "expected": list(values)}:
            # Within an Optional their order is that of the first equal literal of the process.
            return sorted(values)
        case {"type": "union", "choices": list(choices)} if {"type": "str"} in choices:
            choices = [one for one in choices if one["type"] != "literal"]
            return rules(choices[0] if len(choices) == 1 else choices, known)
    return {
        name: _members(one, known) if name == "fields" else rules(one, known)
        for name, one in schema.items()
        if name not in NO_RULES
    }


def _members(fields: Schema, known: Definitions) -> list[tuple[str, Schema]]:
    """The members of a typed dictionary in their order: the first wrong one is reported."""
    assert isinstance(fields, dict)
    return [(name, rules(field, known)) for name, field in fields.items()]


def checked(kind: type, unchecked: frozenset[str]) -> Mapping[str, Schema]:
    """The rules of a type's members, but for those that are left `unchecked`."""
    found = rules(TypeAdapter(kind).core_schema, {})
    assert isinstance(found, dict)
    return {**found, "fields": [one for one in found["fields"] if one[0] not in unchecked]}


ROOTS = [(wire, root) for wire in WIRES for root in wire.roots]


@pytest.mark.parametrize(("wire", "root"), ROOTS, ids=lambda one: getattr(one, "own_name", ""))
def test_a_written_type_checks_what_the_type_of_the_sdk_checks(wire: Wire, root: Root) -> None:
    module = importlib.import_module(f"semantic_server.http.{wire.package}.request_types")
    written = getattr(module, root.own_name)
    assert checked(written, root.unchecked) == checked(root.load(), root.unchecked)


def test_the_modules_are_what_the_tool_writes() -> None:
    command = [sys.executable, "-m", "tools.request_types", "--check"]
    done = subprocess.run(command, capture_output=True, check=False, text=True)
    assert done.returncode == 0, done.stderr


def test_a_server_imports_no_sdk() -> None:
    code = (
        "import sys, semantic_server.http.app as app, semantic_server.http.lifecycle as life;"
        "app.create_app(); life.build_validators(); print({'openai', 'anthropic'} & {*sys.modules})"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, text=True)
    assert done.stdout.strip() == "set()"
