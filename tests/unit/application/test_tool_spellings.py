"""Tools are remembered as they were written first, inside a budget."""

from __future__ import annotations

from semantic.application.chat.replay import ToolSpellings
from semantic.domain.chat import Tool, tool_text

SCOPE = b"a tenant's"


def tool(name: str, keys: str = "ab", description: str = "") -> Tool:
    return Tool(name, description, {"properties": {key: {"type": "string"} for key in keys}})


def first(spellings: ToolSpellings, *tools: Tool, scope: bytes = SCOPE) -> tuple[Tool, ...]:
    return spellings.first(tools, [tool_text(one) for one in tools], scope)


def keys(tools: tuple[Tool, ...]) -> list[str]:
    return ["".join(one.parameters["properties"]) for one in tools]  # type: ignore[arg-type]


def test_the_first_spelling_stands_and_the_order_of_the_tools_is_the_requests() -> None:
    spellings = ToolSpellings()
    first(spellings, tool("a"), tool("b"))
    found = first(spellings, tool("b", "ba"), tool("a", "ba"), tool("c", "ba"))
    assert [one.name for one in found] == ["b", "a", "c"]
    assert keys(found) == ["ab", "ab", "ba"]


def test_what_says_something_else_is_another_tool() -> None:
    spellings = ToolSpellings()
    first(spellings, tool("a"))
    changed = tool("a", "ba", "Does it.")
    assert first(spellings, changed) == (changed,)
    assert keys(first(spellings, tool("a", "ba"), scope=b"another's")) == ["ba"]


def test_the_last_used_stay_inside_the_budget() -> None:
    spellings = ToolSpellings(max_bytes=1000)
    for number in range(100):
        first(spellings, tool(f"tool {number}"))
        assert keys(first(spellings, tool("tool 0", "ba"))) == ["ab"]
        assert spellings._tools.weight <= 1000
    assert keys(first(spellings, tool("tool 1", "ba"))) == ["ba"]
    first(spellings, tool("large", description="x" * 2000))
    assert 0 < spellings._tools.weight <= 1000


def test_a_tenants_spellings_do_not_push_out_anothers() -> None:
    spellings = ToolSpellings(max_bytes=1000)
    first(spellings, tool("own"))
    for number in range(100):
        first(spellings, tool(f"tool {number}"), scope=b"another's")
    assert keys(first(spellings, tool("own", "ba"))) == ["ab"]


def test_what_is_not_kept_is_written_as_others_wrote_it_and_not_remembered() -> None:
    spellings = ToolSpellings()
    texts = [tool_text(tool("a"))]
    assert keys(spellings.first([tool("a", "ba")], texts, SCOPE, keep=False)) == ["ba"]
    assert spellings._tools.weight == 0
    first(spellings, tool("a"))
    assert keys(spellings.first([tool("a", "ba")], texts, SCOPE, keep=False)) == ["ab"]
