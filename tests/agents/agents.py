"""The agents that are checked: what is fetched for each, how it is asked, and what it reports."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final


class ReportError(Exception):
    """An agent's report says that something failed, or is not what its version writes."""


@dataclass(frozen=True, slots=True)
class Report:
    """What an agent says of one turn, in its own numbers.

    `context` is what it takes for the model's context, None where it does not say.
    """

    text: str
    prompt_tokens: int
    cached_tokens: int
    context: int | None = None

    def since(self, before: Report) -> Report:
        """This turn alone, where both count all turns of a conversation so far."""
        return replace(
            self,
            prompt_tokens=self.prompt_tokens - before.prompt_tokens,
            cached_tokens=self.cached_tokens - before.cached_tokens,
        )

    @property
    def cached_share(self) -> float:
        """Of the prompt; 0 for no prompt."""
        return self.cached_tokens / self.prompt_tokens if self.prompt_tokens else 0.0


@dataclass(frozen=True, slots=True)
class Program:
    """A program's `name`, and its npm `package` at one `version`.

    `binaries` are patterns below `node_modules`: packages of npm's choice for this machine hold
    the program.
    """

    name: str
    package: str
    version: str
    binaries: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Agent(Program):
    """An agent that `semantic launch` knows by its name.

    `begin` and `go_on` are its arguments before the words of a turn, and `read` its report of one.
    """

    begin: tuple[str, ...]
    go_on: tuple[str, ...]
    tool: str
    arguments: str
    read: Callable[[str], Report]
    sums_up: bool = False


@dataclass(frozen=True, slots=True)
class Stranger(Program):
    """An agent that its user sets up: with variables, or with files below its home.

    In all of them {url} and {home} stand for the server and the home. `commands` are run one after
    the other; the last is a turn, and prints what was answered.
    """

    commands: tuple[tuple[str, ...], ...]
    variables: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[str, str] = field(default_factory=dict)


def read_claude(printed: str) -> Report:
    """One JSON document. This wire counts a prompt in three parts that do not overlap."""
    found = _json(printed)
    if found.get("is_error") is not False:
        raise ReportError(f"claude failed: {found.get('result')!r:.300}")
    usage = _object(found, "usage")
    cached = _number(usage, "cache_read_input_tokens")
    parts = (_number(usage, "input_tokens"), _number(usage, "cache_creation_input_tokens"))
    models = list(_object(found, "modelUsage").values())
    contexts = {_number(one, "contextWindow") for one in models if isinstance(one, dict)}
    if len(contexts) != 1:
        raise ReportError(f"claude names several contexts: {sorted(contexts)}")
    return Report(str(found.get("result")), cached + sum(parts), cached, contexts.pop())


def read_codex(printed: str) -> Report:
    """A JSON document a line; the last one has the turn's usage."""
    lines = list(_lines(printed))
    done = [line for line in lines if line.get("type") == "turn.completed"]
    if not done:
        told = [line for line in lines if line.get("type") in {"error", "turn.failed"}]
        raise ReportError(f"codex did not complete its turn: {json.dumps(told[-1:])[:300]}")
    usage = _object(done[-1], "usage")
    items = [_object(line, "item") for line in lines if line.get("type") == "item.completed"]
    texts = [str(item.get("text")) for item in items if item.get("type") == "agent_message"]
    return Report(
        "".join(texts), _number(usage, "input_tokens"), _number(usage, "cached_input_tokens")
    )


def read_opencode(printed: str) -> Report:
    """A JSON document a line; each step has a usage whose parts do not overlap."""
    lines = list(_lines(printed))
    told = [line for line in lines if line.get("type") == "error"]
    parts = [_object(line, "part") for line in lines if "part" in line]
    steps = [_object(part, "tokens") for part in parts if part.get("type") == "step-finish"]
    if told or not steps:
        raise ReportError(f"opencode did not complete its turn: {json.dumps(told[-1:])[:300]}")
    caches = [_object(step, "cache") for step in steps]
    cached = sum(_number(cache, "read") for cache in caches)
    rest = sum(_number(step, "input") for step in steps)
    written = sum(_number(cache, "write") for cache in caches)
    texts = [str(part.get("text")) for part in parts if part.get("type") == "text"]
    return Report("".join(texts), cached + rest + written, cached)


def _json(text: str) -> dict[str, object]:
    try:
        found = json.loads(text)
    except ValueError:
        raise ReportError(f"expected JSON, got {text!r:.300}") from None
    if not isinstance(found, dict):
        raise ReportError(f"expected a JSON object, got {text!r:.300}")
    return found


def _lines(text: str) -> Iterator[dict[str, object]]:
    return (_json(line) for line in text.splitlines() if line.strip())


def _object(document: dict[str, object], name: str) -> dict[str, object]:
    found = document.get(name)
    if not isinstance(found, dict):
        raise ReportError(f"expected an object {name!r} among {sorted(document)}")
    return found


def _number(document: dict[str, object], name: str) -> int:
    found = document.get(name)
    if not isinstance(found, int):
        raise ReportError(f"expected a number {name!r} among {sorted(document)}")
    return found


AGENTS: Final = (
    Agent(
        "claude",
        "@anthropic-ai/claude-code",
        "2.1.329",
        ("@anthropic-ai/claude-code-*/claude",),
        ("--allowedTools", "Bash", "--output-format", "json", "-p"),
        ("--allowedTools", "Bash", "--output-format", "json", "--continue", "-p"),
        "Bash",
        '{"command": "true", "description": "Do nothing"}',
        read_claude,
    ),
    Agent(
        "codex",
        "@openai/codex",
        "0.169.0",
        ("@openai/codex-*/vendor/*/bin/codex",),
        ("exec", "--strict-config", "--skip-git-repo-check", "--json"),
        ("exec", "--strict-config", "--skip-git-repo-check", "--json", "resume", "--last"),
        "exec_command",
        '{"cmd": "true"}',
        read_codex,
        sums_up=True,
    ),
    Agent(
        "opencode",
        "opencode-ai",
        "1.18.33",
        ("opencode-*/bin/opencode",),
        ("run", "--format", "json"),
        ("run", "--format", "json", "--continue"),
        "bash",
        '{"command": "true", "description": "Do nothing"}',
        read_opencode,
    ),
)


STRANGERS: Final = (
    Stranger(
        "qwen-code",
        "@qwen-code/qwen-code",
        "0.24.4",
        (".bin/qwen",),
        (("--auth-type", "openai", "-p", "Say hello."),),
        {"OPENAI_BASE_URL": "{url}/v1", "OPENAI_API_KEY": "none", "OPENAI_MODEL": "one-sentence"},
    ),
    Stranger(
        "cline",
        "cline",
        "3.0.65",
        (".bin/cline",),
        (
            ("auth", "openai", "-k", "none", "-m", "one-sentence", "-b", "{url}/v1"),
            ("--json", "-P", "openai", "-m", "one-sentence", "Say hello."),
        ),
    ),
    Stranger(
        "continue",
        "@continuedev/cli",
        "1.5.47",
        (".bin/cn",),
        (("--config", "{home}/config.yaml", "-p", "--auto", "Say hello."),),
        files={
            "config.yaml": """\
name: local
version: 1.0.0
schema: v1
models:
  - name: one-sentence
    provider: openai
    model: one-sentence
    apiBase: {url}/v1
    apiKey: none
    roles: [chat]
    capabilities: [tool_use]
"""
        },
    ),
)


def named(names: Sequence[str]) -> list[Agent | Stranger]:
    """The agents of those names, or all of them; raises KeyError for a name that none has."""
    known: dict[str, Agent | Stranger] = {one.name: one for one in (*AGENTS, *STRANGERS)}
    return [known[name] for name in names or known]
