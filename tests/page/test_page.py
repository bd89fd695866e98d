"""The page in Chromium: what it shows, what it does, and what cannot be done to it."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from urllib.parse import urlsplit

import pytest
from playwright.sync_api import Browser, Locator, Page, expect, sync_playwright
from pydantic import SecretStr

from semantic.domain.answer import TextDelta
from semantic_server.http.identity import tenant_name
from semantic_server.http.settings import ServerSettings
from tests.page.programs import PROGRAMS
from tests.support.fake_serving import Script
from tests.support.http_server import RunningServer
from tests.support.model_server import several
from tests.support.page_world import ManyAgents, busy, serving, summary
from tests.support.served_agents import AgentsWorld

pytestmark = pytest.mark.process

KEY, OTHER, OPERATOR = "the key of a", "the key of b", "the key of the operator"
KEYED = ServerSettings(
    api_keys=(SecretStr(KEY), SecretStr(OTHER)), operator_keys=(SecretStr(OPERATOR),)
)
_MILLISECONDS = 30_000
"""For a page on a machine that has much else to do."""
MOST_ROWS = 40
"""Of agents in the document, however many there are."""


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    program = next(filter(None, map(shutil.which, PROGRAMS)), None)
    if program is None:
        pytest.skip("there is no Chromium; Debian: apt-get install chromium")
    with sync_playwright() as playwright:
        expect.set_options(timeout=_MILLISECONDS)
        started = playwright.chromium.launch(executable_path=program)
        yield started
        started.close()


@pytest.fixture
def page(browser: Browser) -> Iterator[Page]:
    """A tab; fails if a script fails, or something is loaded that the policy does not allow."""
    with browser.new_context(viewport={"width": 1000, "height": 800}) as context:
        tab = context.new_page()
        tab.set_default_timeout(_MILLISECONDS)
        problems: list[str] = []
        tab.on("pageerror", lambda error: problems.append(str(error)))
        tab.on("console", lambda one: _note(one.type, one.text, problems))
        yield tab
        assert problems == []


def _note(kind: str, text: str, problems: list[str]) -> None:
    if kind == "error" and "Failed to load resource" not in text:  # a refused request
        problems.append(text)


def opened(page: Page, server: RunningServer) -> Page:
    page.goto(server.url)
    expect(page.get_by_role("status").first).to_have_text(re.compile("Connected"))
    return page


def row(page: Page, agent: str) -> Locator:
    return page.get_by_role("treeitem").filter(has=page.get_by_text(agent, exact=True))


def open_agent(page: Page, agent: str) -> Locator:
    row(page, agent).click()
    expect(page.get_by_role("heading", name=f"Agent {agent}")).to_be_focused()
    return page.locator("semantic-agent")


def test_a_load_is_shown_as_it_is(page: Page) -> None:
    served = busy()
    with serving(served.agents) as server:
        opened(page, server)
        expect(row(page, "decodes").locator(".state")).to_have_text(re.compile("decoding|tok/s"))
        expect(row(page, "reads").locator(".state")).to_have_text("prefill 0 %")
        expect(row(page, "waits").locator(".state")).to_have_text("queued")
        expect(row(page, "reviewer").locator(".state")).to_have_text("idle")
        expect(row(page, "reviewer")).to_have_attribute("aria-level", "2")
        expect(row(page, "reviewer")).to_contain_text(re.compile("85 % ?of 700 tokens"))
        budgets = page.locator("semantic-budgets")
        expect(budgets).to_contain_text("25 B of 100 B, 25 %")
        expect(budgets.get_by_role("img", name="Disk: 300 B of 1000 B, 30 %")).to_be_visible()
        served.world.finish()
        expect(row(page, "waits").locator(".state")).to_have_text("idle")
        expect(page.locator("body")).not_to_contain_text(re.compile("null|undefined|NaN"))


def test_several_models_are_shown_and_none_is_loaded_by_looking(page: Page) -> None:
    asked: list[str] = []
    page.on("request", lambda one: asked.append(urlsplit(one.url).path))
    served = AgentsWorld()
    served.turn("ann", 20)
    with several() as one:
        one.loader.agents["llama"] = served.agents
        opened(page, one.server)
        models = page.locator("semantic-models").get_by_role("row")
        expect(models.nth(1)).to_contain_text(re.compile("org/qwen.*unloaded.*when needed"))
        assert one.loader.loads.total() == 0
        assert "/v1/agents" not in asked
        page.locator("semantic-agents").get_by_label("Model").select_option("llama")
        expect(row(page, "ann")).to_be_visible()
        expect(models.nth(2)).to_contain_text(re.compile("llama.*idle for .*25 %"))
        chat = page.locator("semantic-chat")
        chat.get_by_label("Model").select_option("llama")
        page.get_by_label("Message").fill("Hi")
        page.get_by_label("Message").press("Enter")
        expect(chat.locator(".assistant")).to_have_text("Hello.")
        expect(page.locator(".lane")).to_contain_text("llama")
        assert one.loader.loads == {"llama": 1}
        models.nth(2).get_by_role("button", name="Unload").click()
        expect(models.nth(2)).to_contain_text("unloaded")
        models.nth(1).get_by_role("button", name="Load").click()
        expect(models.nth(1)).to_contain_text("idle for")
        assert one.loader.loads == {"llama": 1, "org/qwen": 1}
        expect(page.locator("body")).not_to_contain_text(re.compile("null|undefined|NaN"))


def test_savings_the_time_line_and_a_chat(page: Page) -> None:
    served = AgentsWorld()
    served.turn("ann", 20)
    asked: list[str] = []
    page.on("request", lambda one: asked.append(urlsplit(one.url).path))
    with serving(served.agents) as server:
        opened(page, server)
        expect(row(page, "ann")).to_be_visible()
        expect(page.locator(".sentence")).to_have_text(re.compile("No prompt today"))
        page.get_by_label("Agent's name").fill("ann")
        page.get_by_label("Message").fill("x" * 50)
        page.get_by_label("Message").press("Enter")
        chat = page.locator("semantic-chat")
        expect(chat.locator(".assistant")).to_have_text("All well.")
        note = chat.locator(".messages .soft")
        expect(note).to_have_text(
            re.compile(r"40 of 50 prompt tokens cached; first token after \d")
        )
        expect(note).to_contain_text("5 cached tokens were computed again: Tool 7 (Bash) changed.")
        sentence = page.locator(".sentence")
        expect(sentence).to_contain_text("4.0 s of prefill saved today")
        expect(sentence).to_contain_text("the cache had 80 % of 50 prompt tokens.")
        expect(page.locator("body")).not_to_contain_text(re.compile("null|undefined|NaN"))
        lane = page.locator(".lane")
        expect(lane).to_contain_text("ann")
        # What has changed is looked at alone: a list costs the server by the blocks of all in it.
        expect(row(page, "ann")).to_be_visible()
        page.wait_for_function("performance.getEntriesByName(`${origin}/v1/agents/ann`).length > 0")
        assert asked.count("/v1/agents") == 1
        expect(lane.get_by_role("img")).to_have_accessible_name(
            re.compile("1 request: waited .* m?s")
        )


def tile(page: Page, name: str) -> Locator:
    return page.locator(".tile").filter(has_text=name)


def test_the_first_screen_says_what_happens_and_what_failed(page: Page) -> None:
    served = AgentsWorld()
    served.turn("ann", 20)
    with serving(served.agents) as server:
        chat = "/v1/chat/completions"
        for _ in range(3):
            body = {"model": "fake", "messages": [{"role": "user", "content": "x" * 50}]}
            assert server.ask("POST", chat, {**body, "agent_id": "ann"}).status == 200
        assert server.ask("POST", chat, {**body, "model": "<b>gpt</b>"}).status == 404
        assert server.ask("POST", "/v1/nowhere", {}).status == 404
        opened(page, server)
        expect(tile(page, "Requests per minute")).to_contain_text("52 failed in 5 min")
        expect(tile(page, "Prompt tokens cached")).to_contain_text("80 %of 150 prompt tokens")
        expect(tile(page, "First token, median")).to_contain_text(re.compile(r"\d ?m?s95 % with"))
        expect(tile(page, "Tokens per second")).to_contain_text(re.compile(r"at most [\d.]+ in"))
        requests = page.locator("semantic-requests tbody tr")
        expect(requests).to_have_count(7)  # two of them have an error's text below
        failed = page.locator("semantic-requests")
        expect(failed).to_contain_text("POST /v1/nowhere is not a route")
        expect(failed).to_contain_text("there is no model '<b>gpt</b>'")
        failed.get_by_label("Only failed ones").check()
        expect(requests).to_have_count(4)
        inside = "semantic-tiles, semantic-timeline, #agents-title"
        low = [box["y"] for one in page.locator(inside).all() if (box := one.bounding_box())]
        assert max(low) < 800
        expect(page.locator("body")).not_to_contain_text(re.compile("null|undefined|NaN"))


def test_a_new_server_says_how_to_connect(page: Page) -> None:
    with serving(AgentsWorld().agents) as server:
        opened(page, server)
        connect = page.locator("semantic-connect")
        expect(connect).to_contain_text(f"semantic launch opencode --url {server.url}")
        box, agents = connect.bounding_box(), page.locator("#agents-title").bounding_box()
        assert box is not None
        assert agents is not None
        assert box["y"] + box["height"] < agents["y"]
        page.context.grant_permissions(["clipboard-read", "clipboard-write"])
        for name in ("curl", "OpenAI", "Anthropic"):
            connect.get_by_text(name, exact=True).click()
            example = connect.locator("details[open]")
            example.get_by_role("button", name="Copy").click()
            expect(example.get_by_role("button", name="Copied")).to_be_visible()
            copied = page.evaluate("navigator.clipboard.readText()")
            if name == "curl":
                done = subprocess.run(["sh", "-c", copied], capture_output=True, check=False)
                assert b"All well." in done.stdout, done.stderr
            else:
                compile(copied, name, "exec")
                assert server.url in copied


def test_an_answer_is_markdown_and_never_markup(page: Page) -> None:
    text = (
        "# One\n\nA **bold** `<b>` and [a link](https://example.org/x).\n\n- a\n  1. b\n- c\n\n"
        "```python\nprint('<i>')\n**no**\n```\n\n| x | y |\n|---|---|\n| 1 | *2* |\n\n> said\n\n"
        "[bad](javascript:alert(1)) <img src=x onerror=alert(1)> " + "`*[" * 2000
    )
    script = Script((TextDelta(text),))
    with serving(AgentsWorld().agents, script=lambda _: script) as server:
        opened(page, server)
        page.get_by_label("Message").fill("Hi")
        page.get_by_label("Message").press("Enter")
        answer = page.locator("semantic-chat .assistant")
        expect(answer.locator("h3")).to_have_text("One")
        expect(answer.locator("strong")).to_have_text("bold")
        expect(answer.locator("p code").first).to_have_text("<b>")
        expect(answer.locator("pre")).to_have_text("print('<i>')\n**no**")
        expect(answer.locator("ul > li")).to_have_text(["ab", "c"])
        expect(answer.locator("ul ol > li")).to_have_text("b")
        expect(answer.locator("td em")).to_have_text("2")
        expect(answer.locator("blockquote")).to_have_text("said")
        expect(answer.locator("a")).to_have_attribute("href", "https://example.org/x")
        expect(answer.locator("img, b, i")).to_have_count(0)


def test_an_agents_blocks_and_actions_each_with_a_confirmation(page: Page) -> None:
    served = AgentsWorld()
    served.turn("ada", 600)
    with serving(served.agents) as server:
        agent = open_agent(opened(page, server), "ada")
        expect(agent.get_by_role("img")).to_have_accessible_name(
            "3 blocks: 3 in the pool; 0 shared with other agents; 0 with a checkpoint."
        )
        expect(agent.locator(".cells svg")).to_have_count(3)
        agent.get_by_role("button", name="Pin").click()
        page.get_by_role("dialog").get_by_role("button", name="Cancel").click()
        expect(row(page, "ada")).not_to_contain_text("pinned")
        expect(agent.get_by_role("button", name="Pin")).to_be_focused()
        agent.get_by_role("button", name="Pin").click()
        page.get_by_role("dialog", name="Pin: ada").get_by_role("button", name="Pin").click()
        expect(agent.locator(".cells.pinned")).to_be_visible()
        expect(row(page, "ada")).to_contain_text("pinned")
        agent.get_by_role("button", name="Fork").click()
        dialog = page.get_by_role("dialog")
        dialog.get_by_label("Name of the new agent").fill("ada")
        dialog.get_by_role("button", name="Fork").click()
        expect(dialog.get_by_role("alert")).to_contain_text("agent 'ada' already exists")
        dialog.get_by_label("Name of the new agent").fill("eve")
        dialog.get_by_role("button", name="Fork").click()
        expect(row(page, "eve")).to_have_attribute("aria-level", "2")
        expect(agent).to_contain_text("3 shared with other agents")
        agent = open_agent(page, "eve")
        agent.get_by_role("button", name="Forget").click()
        page.get_by_role("dialog").get_by_role("button", name="Forget").click()
        expect(row(page, "eve")).to_have_count(0)
        assert server.ask("GET", "/v1/agents/eve").status == 404


def test_a_request_is_cancelled(page: Page) -> None:
    served = busy()
    with serving(served.agents) as server:
        agent = open_agent(opened(page, server), "decodes")
        agent.get_by_role("button", name="End requests").click()
        page.get_by_role("dialog").get_by_role("button", name="End its requests").click()
        expect(page.get_by_role("dialog")).to_have_count(0)
        for done in served.world.finish():
            assert (done.finish_reason == "cancelled") == (done.agent_id == "decodes")
        expect(agent.get_by_role("button", name="End requests")).to_be_hidden()


def test_a_restart_of_the_server_is_shown_and_survived(page: Page) -> None:
    with ExitStack() as first:
        server = first.enter_context(serving(busy().agents))
        opened(page, server)
        first.close()
        expect(page.get_by_role("status").first).to_contain_text("No connection to the server")
    later = AgentsWorld()
    later.turn("another", 20)
    with serving(later.agents, port=server.port):
        expect(page.get_by_role("status").first).to_have_text(
            "The server was restarted; connected again."
        )
        expect(row(page, "another")).to_be_visible()
        expect(row(page, "reads")).to_have_count(0)


def test_of_5000_agents_only_those_in_view_are_in_the_document(page: Page) -> None:
    many = ManyAgents([summary(f"agent {n}", 5000.0 - n) for n in range(5000)])
    with serving(many) as server:
        opened(page, server)
        tree = page.get_by_role("tree")
        rows = page.get_by_role("treeitem")
        expect(row(page, "agent 0").locator(".state")).to_have_text("on disk")
        assert (rows.count() <= MOST_ROWS, many.pages) == (True, 1)
        tree.focus()
        for loaded in (*range(250, 5000, 200), 5000):  # each end loads the next page
            tree.press("End")
            expect(page.locator("semantic-agents .row")).to_contain_text(f"{loaded:,} agents")
        tree.press("End")
        expect(row(page, "agent 4999")).to_be_visible()
        assert rows.count() <= MOST_ROWS
        tree.press("Home")
        tree.press("ArrowDown")
        expect(page.locator(".agent.active")).to_contain_text("agent 1")
        page.get_by_label("Agents whose name has").fill("agent 4321")
        expect(rows).to_have_count(1)


HOSTILE = (
    "<img src=x onerror=document.title='hit'>",
    "\u202etxt.exe \u200fnames",
    "א" * 20,
    "w" * 256,
    "</script><script>document.title='hit'</script>",
    "a/../b?c#d%2F",
    "..",
)


def test_hostile_names_stay_names(page: Page) -> None:
    served = AgentsWorld(total_blocks=200)
    for name in HOSTILE:
        served.turn(name, 20)
    with serving(served.agents) as server:
        opened(page, server)
        rows = page.get_by_role("treeitem")
        expect(rows).to_have_count(len(HOSTILE))
        for at in range(len(HOSTILE)):
            rows.nth(at).click()
            section = page.locator("semantic-agent")
            expect(section.get_by_role("heading")).to_be_focused()
            nameable = "A browser cannot ask" not in section.inner_text()
            if nameable:
                expect(section).to_contain_text("24 after 1 turn")
        expect(page.get_by_text(r"\u{202e}txt.exe \u{200f}names").first).to_be_visible()
        expect(page.locator("img[src]")).to_have_count(0)
        assert page.title() == "semantic"
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")


def test_a_server_with_keys_asks_for_one_and_shows_what_is_its_own(page: Page) -> None:
    served = AgentsWorld()
    served.turn("ada", 20, tenant=tenant_name(KEY))
    served.turn("bob", 20, tenant=tenant_name(OTHER))
    with serving(served.agents, KEYED) as server:
        page.goto(server.url)
        expect(page.get_by_label("This server has keys")).to_be_focused()
        expect(page.locator("#content")).to_be_hidden()
        page.get_by_label("This server has keys").fill("wrong")
        page.get_by_role("button", name="Open").click()
        expect(page.get_by_role("alert").first).to_have_text("The server does not know this key.")
        page.get_by_label("This server has keys").fill(KEY)
        page.get_by_role("button", name="Open").click()
        expect(row(page, "ada")).to_be_visible()
        expect(row(page, "bob")).to_have_count(0)
        expect(page.locator("semantic-budgets")).to_contain_text("about all tenants")
        assert page.evaluate("[localStorage.length, document.cookie, location.href]") == [
            0,
            "",
            f"{server.url}/",
        ]
        page.reload()  # the tab keeps it
        expect(row(page, "ada")).to_be_visible()


def test_an_operator_chooses_a_tenant_and_has_no_chat(page: Page) -> None:
    served = AgentsWorld()
    for key, agent in ((KEY, "ada"), (OTHER, "bob")):
        served.turn(agent, 20, tenant=tenant_name(key))
    with serving(served.agents, KEYED) as server:
        page.goto(server.url)
        page.get_by_label("This server has keys").fill(OPERATOR)
        page.get_by_role("button", name="Open").click()
        expect(page.locator("semantic-budgets")).to_contain_text("25 B of 100 B")
        expect(page.locator("semantic-chat")).to_be_hidden()
        for key, agent in ((KEY, "ada"), (OTHER, "bob")):
            tenant = served.agents.id_of(tenant_name(key)).id
            page.get_by_label("Tenant").select_option(tenant)
            expect(page.get_by_role("treeitem")).to_have_count(1)
            opened_agent = open_agent(page, agent)
            expect(opened_agent).to_contain_text("24 after 1 turn")
            expect(opened_agent.get_by_role("button", name="Fork")).to_be_hidden()


def test_the_keyboard_reaches_everything(page: Page) -> None:
    served = busy()
    with serving(served.agents) as server:
        opened(page, server)
        expect(row(page, "reviewer")).to_be_visible()
        page.keyboard.press("Tab")
        expect(page.get_by_role("link", name="Skip to the agents")).to_be_focused()
        page.keyboard.press("Enter")
        page.keyboard.press("Tab")
        page.keyboard.press("Tab")
        tree = page.get_by_role("tree")
        expect(tree).to_be_focused()
        parent = row(page, "claude-code-s1")
        while not parent.evaluate("node => node.classList.contains('active')"):
            page.keyboard.press("ArrowDown")
        page.keyboard.press("ArrowLeft")
        expect(parent).to_have_attribute("aria-expanded", "false")
        expect(row(page, "reviewer")).to_have_count(0)
        page.keyboard.press("ArrowRight")
        expect(row(page, "reviewer")).to_be_visible()
        page.keyboard.press("Enter")
        expect(page.get_by_role("heading", name="Agent claude-code-s1")).to_be_focused()
        page.get_by_role("button", name="Pin").press("Enter")
        expect(page.get_by_role("dialog")).to_be_visible()
        page.keyboard.press("Escape")
        expect(page.get_by_role("dialog")).to_have_count(0)
        page.get_by_role("button", name="Close").press("Enter")
        expect(tree).to_be_focused()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_narrow_screen_shows_all_of_it(page: Page, scheme: str) -> None:
    page.set_viewport_size({"width": 360, "height": 740})
    page.emulate_media(color_scheme="dark" if scheme == "dark" else "light")
    served = busy()
    with serving(served.agents) as server:
        open_agent(opened(page, server), "claude-code-s1")
        assert page.evaluate("document.documentElement.scrollWidth") == 360
        light = page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert (light == "rgb(251, 251, 250)") == (scheme == "light")


def test_the_policy_stops_what_a_mistake_would_let_in(browser: Browser) -> None:
    with serving(AgentsWorld().agents) as server, browser.new_context() as context:
        page = opened(context.new_page(), server)
        refused = page.evaluate(
            "() => { try { document.body.innerHTML = '<b>x</b>'; return '' }"
            " catch (error) { return error.name } }"
        )
        assert refused == "TypeError"
