"""Writes the pictures of the page in the documents: a real server with the model inside the
package, under a load of sessions, subagents and forks.

    python -m tests.page
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
import threading
from http.client import HTTPConnection
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

from playwright.sync_api import Page, sync_playwright

from tests.page.programs import PROGRAMS
from tests.support.serve_process import served

IMAGES: Final = Path(__file__).parents[2] / "docs" / "images"
SYSTEM: Final = "You review a storage engine. Rules: be brief, be exact, quote the line. " * 30
TOOLS: Final = [
    {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
]
FLAGS: Final = ("--max-batch", "3", "--pool-gb", "0.05", "--ram-gb", "0.2", "--disk-gb", "1")
LIGHT, TOP = "page-light.png", "page-top.png"
WIDE: Final = 1000
_MARGIN: Final = 16
_SECONDS: Final = 300.0


def ask(url: str, agent: str | None, text: str, most: int, headers: dict[str, str]) -> None:
    """One chat completion, read to its end."""
    body = {
        "model": "default",
        "messages": [{"role": "system", "content": SYSTEM}, {"role": "user", "content": text}],
        "max_tokens": most,
        "ignore_eos": True,
        "tools": TOOLS,
        "tool_choice": "none",
        **({} if agent is None else {"agent_id": agent}),
    }
    connection = HTTPConnection(urlsplit(url).netloc, timeout=_SECONDS)
    connection.request(
        "POST",
        "/v1/chat/completions",
        json.dumps(body).encode(),
        {"content-type": "application/json", **headers},
    )
    connection.getresponse().read()
    connection.close()


def prepare(url: str) -> None:
    """Agents that have had their turns: a session with subagents, and one alone that was forked."""
    session = {"x-claude-code-session-id": "review-of-the-store"}
    ask(url, None, "Which files are there?", 24, session)
    for name in ("quota", "recovery", "index"):
        ask(url, None, f"Look at the {name}.", 24, {**session, "x-claude-code-agent-id": name})
    ask(url, "planner", "Make a plan. " * 40, 24, {})
    ask(url, "planner", "Make another plan. " * 40, 24, {})
    connection = HTTPConnection(urlsplit(url).netloc, timeout=_SECONDS)
    for name in ("plan A", "plan B"):
        body = json.dumps({"new_id": name}).encode()
        connection.request("POST", "/v1/agents/planner/fork", body)
        connection.getresponse().read()
    connection.close()


def picture(page: Page, url: str, name: str, agent: str) -> None:
    """One picture of the whole page, with the blocks of an agent; for a wide one, of its top too:
    figures, time line and agents."""
    page.goto(url)
    page.get_by_role("treeitem").filter(has_text=agent).first.click()
    page.locator("semantic-agent .cells").wait_for()
    page.locator("semantic-agents .state.decode").first.wait_for()
    page.locator(".lane").first.wait_for()
    page.screenshot(path=IMAGES / name, full_page=True)
    if name == LIGHT:
        agents = page.locator("semantic-agents").bounding_box()
        assert agents is not None, "there is no list of agents"
        bottom = agents["y"] + agents["height"] + page.evaluate("scrollY") + _MARGIN
        page.screenshot(
            path=IMAGES / TOP,
            full_page=True,
            clip={"x": 0, "y": 0, "width": WIDE, "height": bottom},
        )


def main() -> int:
    """Write the pictures; 1 without Chromium."""
    program = next(filter(None, map(shutil.which, PROGRAMS)), None)
    if program is None:
        sys.stderr.write("expected Chromium; Debian: apt-get install chromium\n")
        return 1
    IMAGES.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder, served(Path(folder), *FLAGS) as server:
        prepare(server.url)
        load = [
            threading.Thread(
                target=ask,
                args=(server.url, name, f"Write about {name}. " * 20, 3000, {}),
                daemon=True,
            )
            for name in ("plan A", "plan B", "critic", "tester", "writer")
        ]
        for one in load:
            one.start()
        with sync_playwright() as playwright:
            browser = playwright.chromium.launch(executable_path=program)
            for name, width, scheme in (
                (LIGHT, WIDE, "light"),
                ("page-dark.png", WIDE, "dark"),
                ("page-phone.png", 360, "light"),
            ):
                context = browser.new_context(
                    viewport={"width": width, "height": 800},
                    color_scheme="dark" if scheme == "dark" else "light",
                )
                picture(context.new_page(), server.url, name, "planner")
                context.close()
            browser.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
