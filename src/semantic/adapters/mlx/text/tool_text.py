"""Tools, calls and results as plain text, for templates that know none of them.

The form is the one that most open models have seen: JSON between marks.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from semantic.ports.chat import Marks

TEXT_CALL_MARKS = Marks("<tool_call>", "</tool_call>")

_ABOUT_TOOLS = """\
# Tools

You can call functions. These are their signatures, one JSON object in each line:
<tools>
{tools}
</tools>

To call a function, write a JSON object with its name and its arguments between these marks:
<tool_call>
{{"name": "<name>", "arguments": {{<arguments>}}}}
</tool_call>"""


def tools_as_text(tools: Sequence[Mapping[str, object]]) -> str:
    """What a system message says of `tools`, each a {"name", "description", "parameters"}."""
    lines = (json.dumps(tool, ensure_ascii=False) for tool in tools)
    return _ABOUT_TOOLS.format(tools="\n".join(lines))


def call_as_text(name: str, arguments: str) -> str:
    """A call as the assistant wrote it; `arguments` is JSON text and stays as it is."""
    name = json.dumps(name, ensure_ascii=False)
    return f'<tool_call>\n{{"name": {name}, "arguments": {arguments}}}\n</tool_call>'


def result_as_text(content: str) -> str:
    """What a tool answered, as its caller hears it."""
    return f"<tool_response>\n{content}\n</tool_response>"


def system_as_text(content: str) -> str:
    """A system message where the template allows none."""
    return f"<system>\n{content}\n</system>"
