"""Who asks, by the headers and fields that real clients send; whatever is wrong is passed over."""

from __future__ import annotations

import json

import pytest
from fastapi import Request
from hypothesis import given
from hypothesis import strategies as st

from semantic.domain.identity import Identity, is_tag
from semantic_server.http.identity import identity_of, read_identity

S, A, P = "0199f3a2-7c1e-7d10", "a7c3", "b9d1"
USER_ID = json.dumps({"device_id": "d", "account_uuid": "", "session_id": S})
ROOT, EXPLORER = (f"/{path}" for path in ("root", "root/explorer"))
TURN = {"session_id": S, "thread_id": S, "agent_name": ROOT, "turn_id": "t", "window_id": "w:0"}
CODEX = {"session-id": S, "thread-id": S, "x-client-request-id": S, "originator": "codex_exec"}


def turn(**fields: str) -> dict[str, str]:
    """Codex's header about its turn."""
    return {"x-codex-turn-metadata": json.dumps({**TURN, **fields})}


CLIENTS = [
    pytest.param({"x-claude-code-session-id": S}, {}, Identity(S, "claude-code"), id="claude-code"),
    pytest.param(
        {}, {"metadata": {"user_id": USER_ID}}, Identity(S, "claude-code"), id="claude-code-body"
    ),
    pytest.param(
        {},
        {"metadata": {"user_id": f"user_{'0f' * 32}_account__session_{S}"}},
        Identity(S, "claude-code"),
        id="claude-code-older",
    ),
    pytest.param(
        {"x-claude-code-session-id": S, "x-claude-code-agent-id": A},
        {"metadata": {"user_id": USER_ID}},
        Identity(S, "claude-code", A, f"claude-code/{S}"),
        id="claude-code-subagent",
    ),
    pytest.param(
        {
            "x-claude-code-session-id": S,
            "x-claude-code-agent-id": A,
            "x-claude-code-parent-agent-id": P,
        },
        {},
        Identity(S, "claude-code", A, f"claude-code/{S}/{P}"),
        id="claude-code-nested",
    ),
    pytest.param(
        {**CODEX, **turn()},
        {"prompt_cache_key": S, "client_metadata": {"session_id": S}},
        Identity(S, "codex"),
        id="codex",
    ),
    pytest.param(
        {**turn()}, {"prompt_cache_key": "other"}, Identity(S, "codex"), id="codex-only-turn"
    ),
    pytest.param(
        {"originator": "codex_exec"}, {"prompt_cache_key": S}, Identity(S, "codex"), id="codex-key"
    ),
    pytest.param(
        {},
        {"client_metadata": {"x-codex-turn-metadata": json.dumps(TURN)}},
        Identity(S, "codex"),
        id="codex-in-body",
    ),
    pytest.param(
        {**CODEX, **turn(thread_id=A, agent_name=EXPLORER), "thread-id": A},
        {},
        Identity(S, "codex", A, f"codex/{S}"),
        id="codex-subagent",
    ),
    pytest.param(
        {**CODEX, **turn(agent_name=EXPLORER)},
        {},
        Identity(S, "codex", EXPLORER, f"codex/{S}"),
        id="codex-agent-by-name",
    ),
    pytest.param(
        {"originator": "codex_exec", "x-codex-turn-metadata": json.dumps({"agent_name": ROOT})},
        {"prompt_cache_key": S},
        Identity(S, "codex"),
        id="codex-without-thread",
    ),
    pytest.param(
        {**CODEX, **turn(thread_id=A, parent_thread_id=P), "thread-id": A},
        {},
        Identity(S, "codex", A, f"codex/{S}/{P}"),
        id="codex-nested",
    ),
    pytest.param(
        {**CODEX, **turn(), "thread-id": A, "x-codex-parent-thread-id": S},
        {},
        Identity(S, "codex", A, f"codex/{S}"),
        id="codex-parent-is-root",
    ),
    pytest.param(
        {"x-session-id": S, "x-session-affinity": S}, {}, Identity(S, "opencode"), id="opencode"
    ),
    pytest.param(
        {"x-session-id": S, "user-agent": "opencode/1.18.33"},
        {},
        Identity(S, "opencode"),
        id="opencode-by-name",
    ),
    pytest.param(
        {"x-session-id": S, "x-session-affinity": S, "x-parent-session-id": P},
        {"prompt_cache_key": "k"},
        Identity(S, "opencode", None, f"opencode/{P}"),
        id="opencode-subagent",
    ),
    pytest.param(
        {"x-correlation-id": S, "x-session-affinity": S}, {}, Identity(S, "aiperf"), id="aiperf"
    ),
    pytest.param({"x-session-id": S}, {}, Identity(S), id="any-session"),
    pytest.param({}, {"metadata": {"session_id": S}, "user": "u"}, Identity(S), id="metadata"),
    pytest.param({}, {"metadata": {"conversation_id": S}}, Identity(S), id="metadata-conversation"),
    pytest.param({}, {"conversation": S}, Identity(S), id="conversation"),
    pytest.param({}, {"conversation": {"id": S}}, Identity(S), id="conversation-object"),
    pytest.param(
        {}, {"prompt_cache_key": "k", "user": "u"}, Identity("k", shared=True), id="cache-key"
    ),
    pytest.param({}, {"user": "u"}, Identity("u", shared=True), id="user"),
    pytest.param({}, {"safety_identifier": "u"}, Identity("u", shared=True), id="safety"),
    pytest.param(
        {}, {"metadata": {"user_id": "u"}}, Identity("u", shared=True), id="anthropic-user"
    ),
    pytest.param({"x-correlation-id": "a-request"}, {}, None, id="correlation-alone"),
    pytest.param({"x-client-request-id": "a-request"}, {}, None, id="request-id-alone"),
    pytest.param({"user-agent": "OpenAI/Python 3.52.0"}, {"model": "m"}, None, id="nothing"),
]


@pytest.mark.parametrize(("headers", "body", "identity"), CLIENTS)
def test_who_asks(
    headers: dict[str, str], body: dict[str, object], identity: Identity | None
) -> None:
    assert read_identity(headers, body) == identity


WRONG = ["", " \n", "\x1b[31m", "x" * 129, "\ud800"]


@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize(
    "header", ["x-claude-code-session-id", "x-session-id", "x-session-affinity", "session-id"]
)
def test_a_wrong_header_is_passed_over(header: str, wrong: str) -> None:
    assert read_identity({header: wrong}, {}) is None
    assert read_identity({header: wrong}, {"user": "u"}) == Identity("u", shared=True)
    assert read_identity({header: wrong, **turn()}, {}) == Identity(S, "codex")


def test_a_wrong_agent_leaves_the_session() -> None:
    headers = {"x-claude-code-session-id": S, "x-claude-code-agent-id": "x" * 200}
    assert read_identity(headers, {}) == Identity(S, "claude-code")
    headers = {"x-session-id": S, "x-session-affinity": S, "x-parent-session-id": "a\x00b"}
    assert read_identity(headers, {}) == Identity(S, "opencode")


@pytest.mark.parametrize(
    "text", ["{", "[]", "null", "3", '"x"', "[" * 100_000, '{"session_id": 3}', "{}", "x" * 20_000]
)
def test_json_that_is_none_is_passed_over(text: str) -> None:
    assert read_identity({"x-codex-turn-metadata": text}, {}) is None
    found = read_identity({}, {"metadata": {"user_id": text}})
    assert found is None or found.shared


_FIELDS = st.sampled_from(["user_id", "session_id", "id", "x-codex-turn-metadata", "thread_id"])
_TEXTS = st.text(max_size=300) | st.sampled_from([USER_ID, json.dumps(TURN)])
_values = st.recursive(
    st.none() | st.integers() | _TEXTS,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(_FIELDS, inner),
    max_leaves=4,
)
_headers = st.dictionaries(
    st.sampled_from([
        "x-claude-code-session-id", "x-claude-code-agent-id", "x-claude-code-parent-agent-id",
        "session-id", "thread-id", "x-codex-turn-metadata", "originator", "x-session-id",
        "x-session-affinity", "x-parent-session-id", "x-correlation-id", "user-agent",
    ]),
    st.text(max_size=200) | st.sampled_from([S, json.dumps(TURN), "codex", "opencode"]),
)  # fmt: skip
_bodies = st.dictionaries(
    st.sampled_from(["metadata", "client_metadata", "conversation", "prompt_cache_key", "user"]),
    _values,
)


@given(_headers, _bodies)
def test_nothing_that_is_sent_does_any_harm(
    headers: dict[str, str], body: dict[str, object]
) -> None:
    found = read_identity(headers, body)
    if found is not None:
        assert is_tag(found.session)
        assert found.agent is None or is_tag(found.agent)
        assert found.numbered(999).isprintable()
        assert len(found.numbered(999)) <= 256
        assert found.parent is None or len(found.parent) <= 256


def test_headers_are_utf_8_as_bodies_are() -> None:
    header = (b"x-session-id", "Sitzung ä".encode())
    request = Request({"type": "http", "headers": [header]})
    assert identity_of(request, {}) == Identity("Sitzung ä")
