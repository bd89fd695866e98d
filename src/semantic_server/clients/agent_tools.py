"""The tools of `semantic mcp`: agents of a running server, for a model that calls tools. Needs the
extra [mcp]."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Final, Literal
from urllib.parse import quote

from mcp.server.mcpserver import MCPServer
from mcp.server.mcpserver.exceptions import ToolError
from mcp.types import ToolAnnotations
from pydantic import Field

from semantic.domain.errors import SemanticError
from semantic_server.clients.server_connection import (
    Document,
    Upload,
    found_object,
    key_for,
    not_ours,
    query,
    send,
)

_SECONDS: Final = 60.0
_AGENT: Final = (
    "id", "depth", "client", "session", "parent", "state", "tokens", "turns", "last_used",
)  # fmt: skip
_CHECKPOINT: Final = ("name", "tokens", "turns", "created")

Agent = Annotated[str, Field(description="The agent's name, as list returns it.")]
Checkpoint = Annotated[str | None, Field(description="The name of one of its checkpoints.")]
Turn = Annotated[int | None, Field(description="A turn of the agent, from 1. Default: its last.")]


@dataclass(frozen=True, slots=True)
class AgentTools:
    """Tools that act on the agents of `model`, by default the first model, of the server at `url`.
    Each returns JSON, and raises ToolError with the server's message."""

    url: str
    key_variable: str
    model: str | None = None

    def list_agents(
        self, agent: Annotated[str | None, Field(description="Only this agent.")] = None
    ) -> str:
        """List the newest agents of the server. Your own is the one with your client and session.
        With agent: list its checkpoints, its turns, and its family of forks and subagents."""
        if agent is None:
            found = self._ask("GET")
            return _json(agents=_rows(found, _AGENT), has_more=found.get("has_more"))
        found = self._ask("GET", agent, "checkpoints")
        family = _rows(self._ask("GET", agent, "family"), _AGENT)
        saved = _rows(found, _CHECKPOINT)
        return _json(checkpoints=saved, turns=found.get("turns"), family=family)

    def checkpoint(
        self,
        agent: Agent,
        name: Annotated[str, Field(description="A name for the checkpoint.")],
        turn: Turn = None,
    ) -> str:
        """Name the state of an agent's conversation after a turn, to fork it later."""
        saved = self._ask("POST", agent, "checkpoints", {"name": name, "turn": turn})
        return _json(**_row(saved, _CHECKPOINT))

    def fork(
        self,
        agent: Agent,
        new_names: Annotated[list[str], Field(description="Unused names, one for each fork.")],
        checkpoint: Checkpoint = None,
        turn: Turn = None,
    ) -> str:
        """Create agents that begin with an agent's conversation, up to a checkpoint or a turn,
        without computing it again. A client uses a fork by sending its name as the agent, in the
        header X-Agent-ID or the field agent_id, with the same messages as before and a new one."""
        body = {"new_ids": new_names, "checkpoint": checkpoint, "turn": turn}
        return _json(agents=_rows(self._ask("POST", agent, "fork", body), _AGENT))

    def why(
        self,
        agent: Agent,
        other: Annotated[str | None, Field(description="An agent to compare with.")] = None,
    ) -> str:
        """Explain how much of an agent's last prompt the cache had, and why not more. With other:
        show where the conversations of two agents part."""
        if other is None:
            return _json(**self._ask("GET", agent, "why"))
        return _json(**self._ask("GET", agent, "diff", other=other))

    def forget(
        self,
        agent: Agent,
        family: Annotated[bool, Field(description="Delete its descendants too.")] = False,
        checkpoint: Checkpoint = None,
    ) -> str:
        """Delete an agent with its checkpoints; with checkpoint, only this one. No undo exists."""
        if checkpoint is None:
            return _json(**self._ask("DELETE", agent, family="true" if family else None))
        if family:
            raise ToolError("expected either family or checkpoint")
        return _json(**self._ask("DELETE", agent, "checkpoints", name=checkpoint))

    def _ask(
        self,
        method: Literal["GET", "POST", "DELETE"],
        agent: str | None = None,
        action: str | None = None,
        body: Mapping[str, object] | None = None,
        **given: str | None,
    ) -> Document:
        parts = [quote(part, safe="") for part in (agent, action) if part is not None]
        path = "/".join(["/v1/agents", *parts]) + query(model=self.model, **given)
        data = b"" if body is None else json.dumps(body).encode()
        upload = None if method == "GET" else Upload((data,), len(data), _SECONDS, method)
        try:
            with send(self.url, path, key_for(self.url, self.key_variable), upload) as reply:
                found = found_object(reply)
                if not isinstance(found, dict):
                    raise not_ours(reply.base)
                return found
        except SemanticError as error:
            raise ToolError(str(error)) from None


def make_tools(tools: AgentTools, version: str) -> MCPServer[object]:
    """Return an MCP server of the five tools, which `run` serves on stdin and stdout."""
    server = MCPServer[object]("semantic", version=version, log_level="ERROR")
    reads, adds = ToolAnnotations(read_only_hint=True), ToolAnnotations(destructive_hint=False)
    server.add_tool(tools.list_agents, "list", annotations=reads, structured_output=False)
    server.add_tool(tools.checkpoint, annotations=adds, structured_output=False)
    server.add_tool(tools.fork, annotations=adds, structured_output=False)
    server.add_tool(tools.why, annotations=reads, structured_output=False)
    server.add_tool(tools.forget, structured_output=False)
    return server


def _rows(found: Document, fields: Sequence[str]) -> list[Document]:
    rows = found.get("data")
    return [_row(row, fields) for row in rows] if isinstance(rows, list) else []


def _row(row: Document, fields: Sequence[str]) -> Document:
    """Return the `fields` of a row, without those that are null."""
    return {name: row[name] for name in fields if row.get(name) is not None}


def _json(**found: object) -> str:
    return json.dumps(found, ensure_ascii=False)
