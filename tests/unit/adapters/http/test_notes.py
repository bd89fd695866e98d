"""Pictures, sounds, documents and foreign blocks are notes on every wire, and end no session."""

from __future__ import annotations

import base64
import struct
from collections.abc import Callable
from typing import Final

import pytest
from hypothesis import given
from hypothesis import strategies as st

from semantic.domain.chat import Message
from semantic_server.http.anthropic.conversation import ConversationReader as AnthropicReader
from semantic_server.http.anthropic.validators import validators
from semantic_server.http.ollama.request import ConversationReader as OllamaReader
from semantic_server.http.openai.conversation import messages_of
from semantic_server.http.openai.responses.input_items import input_of
from semantic_server.http.openai.responses.tools import ToolSet
from semantic_server.http.request_fields.notes import attachment, block_note, picture

Json = dict[str, object]

PNG: Final = b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR" + struct.pack(">II", 1024, 768) + bytes(900)
JPEG: Final = (
    b"\xff\xd8\xff\xe0\0\x04ab\xff\xc4\0\x03c\xff\xc2\0\x11\x08"
    + struct.pack(">HH", 480, 640)
    + bytes(50)
)
GIF: Final = b"GIF89a" + struct.pack("<HH", 30, 20) + bytes(9)
LOSSY: Final = b"RIFF\0\0\0\0WEBPVP8 " + bytes(10) + struct.pack("<HH", 50, 40) + bytes(9)
LOSSLESS: Final = b"RIFF\0\0\0\0WEBPVP8L" + bytes(5) + struct.pack("<I", 49 | 39 << 14) + bytes(9)
EXTENDED: Final = b"RIFF\0\0\0\0WEBPVP8X" + bytes(8) + b"\x31\0\0\x27\0\0" + bytes(9)
SEEN: Final = "[image, 1024 x 768 PNG: this model reads text only]"


def encoded(data: bytes) -> str:
    return base64.b64encode(data).decode()


def url(data: bytes, kind: str = "image/png") -> str:
    return f"data:{kind};base64,{encoded(data)}"


@pytest.mark.parametrize(
    ("data", "note"),
    [
        (PNG, "image, 1024 x 768 PNG"),
        (JPEG, "image, 640 x 480 JPEG"),
        (GIF, "image, 30 x 20 GIF"),
        (LOSSY, "image, 50 x 40 WebP"),
        (LOSSLESS, "image, 50 x 40 WebP"),
        (EXTENDED, "image, 50 x 40 WebP"),
        (PNG[:18], "image, PNG"),
        (JPEG[:8] + bytes(20), "image, JPEG"),
        (b"<svg>" + bytes(2000), "image, 2 kB"),
        (b"it is no picture.", "image, 18 bytes"),
    ],
)
def test_a_picture_is_known_by_its_first_bytes(data: bytes, note: str) -> None:
    for source in (url(data), encoded(data)):
        assert picture(source)[0] == f"[{note}: this model reads text only]"
    assert picture(url(data))[1].digest == picture(encoded(data))[1].digest
    assert picture(url(data))[1].digest != picture(url(data + b"1234"))[1].digest


@pytest.mark.parametrize("source", ["https://a/b.png", "file-123", "", "data:image/png,abc"])
def test_a_picture_that_is_elsewhere_is_not_fetched(source: str) -> None:
    note, _ = picture(source)
    assert note == "[image that is not in the request: this model reads text only]"


@given(st.binary(max_size=99), st.sampled_from([b"\x89PNG", b"\xff\xd8\xff", b"GIF8", b"RIFF"]))
def test_no_bytes_break_a_note(data: bytes, start: bytes) -> None:
    for source in (url(start + data), encoded(start + data), (start + data).decode("latin-1")):
        note, _ = picture(source)
        assert note.startswith("[image")
        assert len(note) < 120
        assert attachment("audio", "wav", source)[0].startswith("[audio, wav")


def test_a_foreign_block_is_what_it_says_to_a_reader() -> None:
    block = {
        "type": "web_search_tool_result",
        "tool_use_id": "x",
        "content": [
            {"title": "Oslo", "url": "https://a", "encrypted_content": "abc", "page_age": None},
            {"title": "Rome", "url": "https://b"},
        ],
    }
    assert block_note("web_search_tool_result", block) == (
        "[web_search_tool_result: Oslo | https://a | Rome | https://b]"
    )
    assert len(block_note("x" * 999, {"text": "y" * 99_999})) < 4100


def by_chat(*messages: Json) -> tuple[Message, ...]:
    return messages_of(list(messages))


def by_messages(*messages: Json) -> tuple[Message, ...]:
    return AnthropicReader(validators()).read({"messages": list(messages)})


def by_responses(*items: Json) -> tuple[Message, ...]:
    return input_of(list(items), ToolSet()).messages


def by_ollama(*messages: Json) -> tuple[Message, ...]:
    return OllamaReader().read(list(messages))


Reader = Callable[..., tuple[Message, ...]]


def one(read: Reader, *given: Json) -> Message:
    (message,) = read(*given)
    return message


SOURCE: Final = {"type": "base64", "media_type": "image/png", "data": encoded(PNG)}
IMAGE: Final = {"type": "image", "source": SOURCE}
IMAGE_URL: Final = {"type": "image_url", "image_url": {"url": url(PNG)}}
INPUT_IMAGE: Final = {"type": "input_image", "image_url": url(PNG)}


@pytest.mark.parametrize(
    ("read", "given"),
    [
        (by_chat, {"role": "user", "content": [{"type": "text", "text": "See"}, IMAGE_URL]}),
        (by_messages, {"role": "user", "content": [{"type": "text", "text": "See"}, IMAGE]}),
        (
            by_responses,
            {"role": "user", "content": [{"type": "input_text", "text": "See"}, INPUT_IMAGE]},
        ),
        (by_ollama, {"role": "user", "content": "See", "images": [encoded(PNG)]}),
    ],
)
def test_a_users_picture_is_a_note_on_every_wire(read: Reader, given: Json) -> None:
    message = one(read, given)
    assert message.content.split() == ["See", *SEEN.split()]
    assert [found.what for found in message.attachments] == ["image, 1024 x 768 PNG"]
    assert message.attachments == (picture(url(PNG))[1],)


@pytest.mark.parametrize(
    ("read", "given"),
    [
        (by_chat, {"role": "tool", "tool_call_id": "c", "content": [IMAGE_URL]}),
        (
            by_messages,
            {
                "role": "user",
                "content": [{"type": "tool_result", "tool_use_id": "c", "content": [IMAGE]}],
            },
        ),
        (by_responses, {"type": "function_call_output", "call_id": "c", "output": [INPUT_IMAGE]}),
        (
            by_responses,
            {
                "type": "computer_call_output",
                "call_id": "c",
                "output": {"type": "computer_screenshot", "image_url": url(PNG)},
            },
        ),
        (by_ollama, {"role": "tool", "content": "", "images": [encoded(PNG)]}),
    ],
)
def test_a_tools_picture_is_a_note_on_every_wire(read: Reader, given: Json) -> None:
    message = one(read, given)
    assert (message.role, message.content) == ("tool", SEEN)
    assert len(message.attachments) == 1


PDF: Final = encoded(b"%PDF" + bytes(2996))


@pytest.mark.parametrize(
    ("read", "part", "note"),
    [
        (
            by_chat,
            {"type": "input_audio", "input_audio": {"data": PDF, "format": "wav"}},
            "audio, wav, 3 kB",
        ),
        (
            by_chat,
            {"type": "file", "file": {"file_data": f"data:application/pdf;base64,{PDF}"}},
            "document, application/pdf, 3 kB",
        ),
        (by_chat, {"type": "file", "file": {"file_id": "file-1"}}, "document"),
        (
            by_responses,
            {"type": "input_file", "filename": "a.pdf", "file_data": PDF},
            "document, a.pdf, 3 kB",
        ),
        (by_responses, {"type": "input_audio", "data": PDF, "format": "mp3"}, "audio, mp3, 3 kB"),
        (
            by_messages,
            {
                "type": "document",
                "source": {"type": "base64", "media_type": "application/pdf", "data": PDF},
            },
            "document, application/pdf, 3 kB",
        ),
        (by_messages, {"type": "document", "source": {"type": "file", "file_id": "f"}}, "document"),
    ],
)
def test_sounds_and_documents_are_notes(read: Reader, part: Json, note: str) -> None:
    message = one(read, {"role": "user", "content": [part]})
    assert message.content == f"[{note}: this model reads text only]"
    assert len(message.attachments) == 1


@pytest.mark.parametrize(
    ("block", "text"),
    [
        ({"type": "tool_reference", "tool_name": "look"}, "[tool_reference: look]"),
        ({"type": "container_upload", "file_id": "f"}, "[container_upload]"),
        ({"type": "something_new", "x": {"text": "new"}}, "[something_new: new]"),
        (
            {"type": "search_result", "title": "T", "source": "https://a", "content": []},
            "[search_result: T]",
        ),
        (
            {"type": "document", "source": {"type": "text", "data": "all of it"}, "title": "T"},
            "T\nall of it",
        ),
        (
            {
                "type": "document",
                "source": {"type": "content", "content": [{"type": "text", "text": "said"}]},
            },
            "said",
        ),
    ],
)
def test_a_block_of_another_service_is_a_note(block: Json, text: str) -> None:
    result = {"type": "tool_result", "tool_use_id": "t1", "content": [block]}
    for content in ([block], [result]):
        message = one(by_messages, {"role": "user", "content": content})
        assert (message.content, message.attachments) == (text, ())


def test_what_another_service_did_stays_in_an_answer() -> None:
    answer: Json = {
        "role": "assistant",
        "content": [
            {"type": "server_tool_use", "id": "s", "name": "web_search", "input": {"query": "q"}},
            {"type": "web_search_tool_result", "tool_use_id": "s", "content": [{"title": "Oslo"}]},
            {"type": "text", "text": "It is cold."},
        ],
    }
    messages = by_messages(answer, {"role": "user", "content": "And now?"})
    assert messages[0].content == (
        "[server_tool_use: web_search | q][web_search_tool_result: Oslo]It is cold."
    )


def test_a_compaction_of_another_service_is_told() -> None:
    message = one(by_responses, {"type": "compaction", "encrypted_content": "abc"})
    assert message.role == "system"
    assert message.content.startswith("[compaction: earlier messages")
