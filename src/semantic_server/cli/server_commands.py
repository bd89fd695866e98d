"""The commands that the server adds to the `semantic` program."""

from __future__ import annotations

from typing import Final

from semantic.cli.options import CommandTable
from semantic_server.cli.bench import bench
from semantic_server.cli.code import code
from semantic_server.cli.launch import LAUNCH_COMMANDS
from semantic_server.cli.running import ARCHIVE_COMMANDS, RUNNING_MODEL_COMMANDS, mcp, memory
from semantic_server.cli.serve import CONFIG_COMMANDS, serve
from semantic_server.cli.service import SERVICE_COMMANDS
from semantic_server.cli.top import top

TABLE: Final = CommandTable(
    commands={"serve": serve},
    apart={"bench": bench, "code": code, "top": top, "memory": memory, "mcp": mcp},
    groups={
        "agents": ("", ARCHIVE_COMMANDS),
        "config": ("The settings of a server: every value, and its source.", CONFIG_COMMANDS),
        "models": ("", RUNNING_MODEL_COMMANDS),
        "service": ("A server that starts with your login (systemd, launchd).", SERVICE_COMMANDS),
        "launch": ("Start a coding agent with a running server.", LAUNCH_COMMANDS),
    },
)
