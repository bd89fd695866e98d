"""The tools of each agent, by what a model wants of them, and how it is run with all of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

from tests.families.sessions import Call

Edit = Callable[[str, tuple[str, str], tuple[str, str]], list[Call]]
"""A file's path, a text in it before and after, and the whole file before and after, to calls."""


@dataclass(frozen=True, slots=True)
class Screen:
    """An agent that continues a session in a terminal alone: its arguments, and the end of what it
    shows until a key is pressed."""

    arguments: tuple[str, ...]
    greeting: str


@dataclass(frozen=True, slots=True)
class Hands:
    """`begin` and `go_on` are arguments before the words of a turn: an agent's own, with leave to
    use its tools. {session} is that of its first turn. `look` shows a picture, if it can."""

    begin: tuple[str, ...]
    go_on: tuple[str, ...]
    shell: Callable[[str], Call]
    edit: Edit
    look: Callable[[str], Call] | None = None
    screen: Screen | None = None


def _editor(name: str, at: str, old: str, new: str, reads: tuple[str, str] | None = None) -> Edit:
    """An editor with these fields; an agent that `reads` wants a file read before."""

    def edit(path: str, text: tuple[str, str], whole: tuple[str, str]) -> list[Call]:
        del whole
        read: list[Call] = [] if reads is None else [(reads[0], {reads[1]: path})]
        return [*read, (name, {at: path, old: text[0], new: text[1]})]

    return edit


def _codex_edit(path: str, text: tuple[str, str], whole: tuple[str, str]) -> list[Call]:
    del text
    return [("exec_command", {"cmd": f"cat > {path} <<'END'\n{whole[1]}END"})]


_CLAUDE: Final = ("--allowedTools", "Bash,Edit,Read", "--output-format", "json")
_CODEX: Final = ("exec", "--strict-config", "--skip-git-repo-check", "--json",
                 "--dangerously-bypass-approvals-and-sandbox")  # fmt: skip
_QWEN: Final = ("--auth-type", "openai", "--yolo")
_CLINE: Final = ("-i", "-P", "openai", "-m", "one-sentence")
_CONTINUE: Final = ("--config", "{home}/config.yaml", "-p", "--auto")

HANDS: Final[Mapping[str, Hands]] = {
    "claude": Hands(
        (*_CLAUDE, "-p"),
        (*_CLAUDE, "--continue", "-p"),
        lambda command: ("Bash", {"command": command, "description": "Do it"}),
        _editor("Edit", "file_path", "old_string", "new_string", ("Read", "file_path")),
        lambda path: ("Read", {"file_path": path}),
    ),
    "codex": Hands(
        _CODEX,
        (*_CODEX, "resume", "--last"),
        lambda command: ("exec_command", {"cmd": command}),
        _codex_edit,
        lambda path: ("view_image", {"path": path}),
    ),
    "opencode": Hands(
        ("run", "--format", "json"),
        ("run", "--format", "json", "--continue"),
        lambda command: ("bash", {"command": command}),
        _editor("edit", "filePath", "oldString", "newString", ("read", "filePath")),
        lambda path: ("read", {"filePath": path}),
    ),
    "qwen-code": Hands(
        (*_QWEN, "-p"),
        (*_QWEN, "--continue", "-p"),
        lambda command: ("run_shell_command", {"command": command, "is_background": False}),
        _editor("edit", "file_path", "old_string", "new_string", ("read_file", "file_path")),
        lambda path: ("read_file", {"file_path": path}),
    ),
    "cline": Hands(
        (),
        (),
        lambda command: ("run_commands", {"commands": [command]}),
        _editor("editor", "path", "old_text", "new_text"),
        screen=Screen(_CLINE, "any other key to close"),
    ),
    "continue": Hands(
        _CONTINUE,
        (*_CONTINUE, "--resume"),
        lambda command: ("Bash", {"command": command}),
        _editor("Edit", "file_path", "old_string", "new_string", ("Read", "filepath")),
    ),
}
