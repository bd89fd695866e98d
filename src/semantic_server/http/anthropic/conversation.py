"""Translates Anthropic's messages, tools and tool choice to the domain's types."""

from __future__ import annotations

import base64
import hashlib
import json
from binascii import Error as Base64Error
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Final

from semantic.domain.chat import Attachment, Message, Tool, ToolCall, ToolChoice
from semantic_server.http.anthropic.validators import ToolChoiceParam, Validators, checked
from semantic_server.http.errors import FieldError
from semantic_server.http.logs import WarnOnce
from semantic_server.http.request_fields.client_tools import ANTHROPIC_TOOLS
from semantic_server.http.request_fields.notes import attachment, block_note, picture
from semantic_server.http.request_fields.table import list_at, mapping_at

_SEAL: Final = "semantic.seal."
_TEXT: Final = "semantic.text."


def signature_of(thought: str) -> str:
    """Return the signature of a thinking block whose text the client sees."""
    return _SEAL + _encoded(hashlib.sha256(_utf8(thought)).digest())


def signature_with_text(thought: str) -> str:
    """Return a signature that contains the text of a thinking block."""
    return _TEXT + _encoded(_utf8(thought))


def thinking_text(shown: str, signature: str) -> str:
    """Return the text of a thinking block that a client sent back."""
    if shown or not signature.startswith(_TEXT):
        return shown
    try:
        data = base64.urlsafe_b64decode(signature.removeprefix(_TEXT))
        return data.decode("utf-8", "surrogatepass")
    except (Base64Error, ValueError):
        return shown  # another server's signature, or a corrupted one


def _encoded(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).decode("ascii")


def _utf8(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


_BILLING: Final = "x-anthropic-billing-header:"
"""Clients put a line before their system prompt. The line begins so and differs per request."""

_BETWEEN_BLOCKS: Final = "\n\n"
_FAILED: Final = "Error: "
"""Prefix of a failed tool's result."""


class ConversationReader:
    """Reads the messages of one request body."""

    def __init__(self, validators: Validators) -> None:
        self._validators = validators
        self._tool_names: dict[str, str] = {}  # tool names by call id
        self.effort: str | None = None  # from the last system message that sets an effort

    def read(self, body: Mapping[str, object]) -> tuple[Message, ...]:
        """Return the system prompt and the messages in order. Raises FieldError."""
        found = list(self._system_prompt(body.get("system")))
        messages = list_at("messages", body.get("messages"))
        last_user = max((i for i, one in enumerate(messages) if _role(one) == "user"), default=-1)
        for number, message in enumerate(messages):
            path = f"messages[{number}]"
            found += self._message(mapping_at(path, message), path, passed=number < last_user)
        if not messages:
            raise FieldError("messages: expected at least one message", param="messages")
        if _role(messages[-1]) == "assistant":
            raise FieldError(
                f"messages[{len(messages) - 1}]: the last message must not be the assistant's; "
                "this server cannot continue an answer",
                param="messages",
            )
        return tuple(found)

    def _system_prompt(self, system: object) -> Iterator[Message]:
        if system is None:
            return
        blocks = _as_blocks(system, "system")
        texts = [self._text(block, f"system[{i}]") for i, block in enumerate(blocks)]
        parts = [text for text in map(_without_billing, texts) if text]
        if parts:
            yield Message("system", _BETWEEN_BLOCKS.join(parts))

    def _message(
        self, message: Mapping[str, object], path: str, *, passed: bool
    ) -> Iterator[Message]:
        """Yield the domain's messages. `passed` is true if a later message is the user's."""
        role = message.get("role")
        match role:
            case "user":
                yield from self._from_user(_content(message, path), path)
            case "assistant":
                yield self._from_assistant(_content(message, path), path)
            case "system":
                yield from self._from_system(message, path, passed=passed)
            case _:
                raise FieldError(
                    f"{path}.role: expected user, assistant or system, got {role!r:.80}",
                    param=f"{path}.role",
                )

    def _from_system(
        self, message: Mapping[str, object], path: str, *, passed: bool
    ) -> Iterator[Message]:
        output = message.get("output_config")
        if output is not None:
            at = f"{path}.output_config"
            found = checked(self._validators.turn_output, output, at)
            self.effort = found.get("effort") or self.effort
        clear_at = message.get("clear_at")
        if clear_at not in (None, "never", "next_user_message"):
            at = f"{path}.clear_at"
            raise FieldError(f"{at}: expected 'never' or 'next_user_message'", param=at)
        if message.get("content") is None or (passed and clear_at == "next_user_message"):
            return
        blocks = _content(message, path)
        texts = [self._text(block, f"{path}.content[{i}]") for i, block in enumerate(blocks)]
        yield Message("system", _BETWEEN_BLOCKS.join(texts))

    def _from_user(self, blocks: Sequence[object], path: str) -> Iterator[Message]:
        if not blocks:
            at = f"{path}.content"
            raise FieldError(f"{at}: expected at least one block", param=at)
        contents: list[_Read] = []
        for number, block in enumerate(blocks):
            at = f"{path}.content[{number}]"
            if _type(block) != "tool_result":
                contents.append(self._content(block, at))
                continue
            if contents:
                yield _joined(Message("user"), contents)
                contents = []
            yield self._tool_result(block, at)
        if contents:
            yield _joined(Message("user"), contents)

    def _tool_result(self, block: object, path: str) -> Message:
        result = checked(self._validators.tool_result, block, path)
        content = mapping_at(path, block).get("content")
        inner = [] if content is None else _as_blocks(content, f"{path}.content")
        contents = [self._content(one, f"{path}.content[{i}]") for i, one in enumerate(inner)]
        call = result["tool_use_id"]
        read = _joined(
            Message("tool", tool_call_id=call, name=self._tool_names.get(call)), contents
        )
        return replace(read, content=_FAILED + read.content) if result.get("is_error") else read

    def _from_assistant(self, blocks: Sequence[object], path: str) -> Message:
        texts: list[str] = []
        thoughts: list[str] = []
        calls: list[ToolCall] = []
        for number, block in enumerate(blocks):
            at = f"{path}.content[{number}]"
            match _type(block):
                case "thinking":
                    thought = checked(self._validators.thinking, block, at)
                    thoughts.append(thinking_text(thought["thinking"], thought["signature"]))
                case "redacted_thinking":
                    checked(self._validators.redacted_thinking, block, at)
                case "tool_use":
                    calls.append(self._tool_use(block, at))
                case _:
                    text, _ = self._content(block, at)
                    texts.append(text)
        return Message("assistant", "".join(texts), "".join(thoughts), tuple(calls))

    def _tool_use(self, block: object, path: str) -> ToolCall:
        call = checked(self._validators.tool_use, block, path)
        self._tool_names[call["id"]] = call["name"]
        return ToolCall(call["id"], call["name"], json.dumps(call["input"], ensure_ascii=False))

    def _content(self, block: object, path: str) -> _Read:
        kind = _type(block)
        if not isinstance(block, dict) or kind == "text":
            return checked(self._validators.text, block, path)["text"], None
        if not isinstance(kind, str):
            raise FieldError(f"{path}: expected a block with a type, got {kind!r:.80}", param=path)
        if kind not in ("image", "document"):
            return block_note(kind, block), None
        source = mapping_at(f"{path}.source", block.get("source") or {})
        data = str(source.get("data") or source.get("url") or source.get("file_id") or "")
        if kind == "image":
            return picture(data)
        match source.get("type"):
            case "text":
                texts = (block.get("title"), block.get("context"), data)
                return "\n".join(text for text in texts if isinstance(text, str) and text), None
            case "content":
                return self._document(source.get("content"), f"{path}.source.content"), None
            case _:
                name = block.get("title") or source.get("media_type") or ""
                return attachment("document", str(name), data)

    def _document(self, content: object, path: str) -> str:
        blocks = enumerate(_as_blocks(content, path))
        return _BETWEEN_BLOCKS.join(self._content(one, f"{path}[{i}]")[0] for i, one in blocks)

    def _text(self, block: object, path: str) -> str:
        return self._content(block, path)[0]


_Read = tuple[str, Attachment | None]
"""The text of a content block. It has an attachment if the text is a note."""


def _joined(message: Message, contents: Sequence[_Read]) -> Message:
    return replace(
        message,
        content=_BETWEEN_BLOCKS.join(text for text, _ in contents),
        attachments=tuple(one for _, one in contents if one is not None),
    )


def _content(message: Mapping[str, object], path: str) -> Sequence[object]:
    return _as_blocks(message.get("content"), f"{path}.content")


def _as_blocks(content: object, path: str) -> Sequence[object]:
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    if not isinstance(content, list):
        raise FieldError(f"{path}: expected a string or a list of blocks", param=path)
    return content


def _without_billing(text: str) -> str:
    if not text.startswith(_BILLING):
        return text
    return text.partition("\n")[2].lstrip("\n")


def _type(block: object) -> object:
    return block.get("type") if isinstance(block, dict) else None


def _role(message: object) -> object:
    return message.get("role") if isinstance(message, dict) else None


def read_tools(validators: Validators, tools: object, warnings: WarnOnce) -> tuple[Tool, ...]:
    """Return the tools that the client runs. Warns about all other tools. Raises FieldError."""
    if tools is None:
        return ()
    found: dict[str, Tool] = {}
    for number, one in enumerate(list_at("tools", tools)):
        path = f"tools[{number}]"
        given = _with_schema(mapping_at(path, one))
        kind = given.get("type")
        if kind not in (None, "custom"):
            warnings.warn(f"/v1/messages: skipped tools of type {kind!r:.80}: this server has none")
            continue
        tool = checked(validators.tool, given, path)
        name = tool["name"]
        if not name:
            raise FieldError(f"{path}.name: expected a name", param=f"{path}.name")
        if name in found:
            raise FieldError(f"{path}.name: duplicate tool {name!r:.80}", param=f"{path}.name")
        found[name] = Tool(
            name,
            tool.get("description", ""),
            mapping_at(f"{path}.input_schema", given.get("input_schema")),
            strict=tool.get("strict", False),
        )
    return tuple(found.values())


def _with_schema(given: Mapping[str, object]) -> Mapping[str, object]:
    kind, _, _ = str(given.get("type")).rpartition("_")  # a date follows
    if kind not in ANTHROPIC_TOOLS:
        return given
    tool = ANTHROPIC_TOOLS[kind]
    own = {"description": tool.description, "input_schema": tool.parameters}
    return {**given, "type": "custom", **own}


def read_choice(choice: ToolChoiceParam | None, tools: Sequence[Tool]) -> tuple[ToolChoice, bool]:
    """Return the tool choice, and True if the request allows parallel calls. Raises FieldError."""
    if choice is None:
        return ToolChoice(), True
    if choice["type"] == "none":
        return ToolChoice("none"), True
    parallel = not choice.get("disable_parallel_tool_use", False)
    if choice["type"] == "auto":
        return ToolChoice(), parallel
    if choice["type"] == "any":
        if not tools:
            raise FieldError('tool_choice "any" requires a tool in tools', param="tool_choice")
        return ToolChoice("required"), parallel
    name = choice["name"]
    if name not in {tool.name for tool in tools}:
        raise FieldError(f"tool_choice.name: tools has no {name!r:.80}", param="tool_choice.name")
    return ToolChoice("required", name), parallel
