"""`semantic chat`: turns from a pipe and at a terminal, memory, and what a turn computes."""

from __future__ import annotations

import io
import json
import os
import pty
import re
import select
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from rich.console import Console

from semantic.adapters.mlx.backend import MLXBackend
from semantic.cli import chat
from semantic.cli.chat import joined
from semantic.cli.dialogue import answer_writer
from semantic.cli.dialogue.answer_writer import MarkdownWriter, complete_blocks
from semantic.cli.dialogue.chat_session import ChatSession
from semantic.composition.engine_settings import Settings
from semantic.domain.errors import (
    BackendError,
    ContextOverflowError,
    InvalidRequestError,
    OperatorError,
)
from semantic.domain.value_objects import SamplingParams
from semantic.library.engine import Engine
from tests.cli.stocked import changed
from tests.cli.support import Ran, command_line, environment, semantic
from tests.support.http_server import until

USAGE = re.compile(
    r"(?P<agent>[\w-]+): (?P<tokens>\d+) tokens in (?P<blocks>\d+) blocks, (?P<bytes>.+)\n"
    r"last turn: (?P<prompt>\d+) prompt tokens, (?P<cached>\d+) cached, "
    r"(?P<new>\d+) prefilled; (?P<generated>\d+) generated\n"
    r"TTFT .+, then .+ tokens/s\n"
)


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with Engine(Settings(pool_blocks=200), max_context=512) as loaded:
        yield loaded


def session(engine: Engine, agent: str) -> ChatSession:
    """A new conversation of greedy answers."""
    talk = ChatSession(engine, agent, 500, SamplingParams())
    talk.begin(None, new=True)
    return talk


# From a pipe


def test_each_line_is_a_turn_that_remembers_the_ones_before() -> None:
    ran = semantic("chat", stdin="My name is Kai.\n\nWhat is my name?\n")
    assert (ran.code, ran.err) == (0, "")
    assert ran.out == "Nice to meet you, Kai.\nYour name is Kai.\n"


def test_a_turn_prefills_only_what_is_new() -> None:
    stdin = "My name is Kai.\nCount to 30.\n/usage\nWhat is my name?\n/usage\n"
    ran = semantic("chat", "--agent", "kai", stdin=stdin)
    before, after = USAGE.finditer(ran.out)
    assert before["agent"] == "kai"
    # All of the turn before, its end token included: the model's own tokens, not a new encoding.
    assert int(after["cached"]) == int(before["prompt"]) + int(before["generated"])
    assert int(after["new"]) < 12
    assert int(after["tokens"]) == int(after["prompt"]) + int(after["generated"])
    assert int(after["blocks"]) == 1


def test_reset_forgets_the_conversation_and_its_cache() -> None:
    ran = semantic("chat", stdin="My name is Kai.\n/reset\n/usage\nWhat is my name?\n")
    assert "agent: 0 tokens in 0 blocks, 0 bytes\nno turn yet\n" in ran.out
    assert ran.out.endswith("You have not told me your name.\n")


def test_a_system_message_is_part_of_the_conversation() -> None:
    ran = semantic("chat", "--system", "The user's name is Zoe.", stdin="What is my name?\n")
    assert ran.out == "Your name is Zoe.\n"


@pytest.mark.parametrize("end", ["/exit\nHello!\n", ""])
def test_the_conversation_ends_with_exit_or_the_input(end: str) -> None:
    ran = semantic("chat", stdin="What is 3 plus 4?\n" + end)
    assert (ran.code, ran.out) == (0, "3 plus 4 is 7.\n")


def test_from_a_pipe_the_first_turn_that_fails_is_the_last() -> None:
    ran = semantic("chat", stdin="What is 3 plus 4?\n/nonsense\nHello!\n")
    assert (ran.code, ran.out) == (2, "3 plus 4 is 7.\n")
    assert ran.err == "error: unknown command '/nonsense'; /help lists them\n"


def test_a_conversation_that_outgrows_the_pool_is_refused() -> None:
    ran = semantic("chat", "--pool-blocks", "4", stdin="Hello!\n")
    assert (ran.code, ran.out) == (2, "")
    assert ran.err.startswith("error: this model's context is 0 tokens; ")


def test_a_line_that_ends_with_a_backslash_continues() -> None:
    ran = semantic("chat", stdin="My name is Kai.\\\n\\\nWhat is my name?\n")
    assert (ran.code, ran.err) == (0, "")
    assert ran.out.startswith("Your name is Kai.\n")
    assert [*joined(["a\\", "b", "", "c\\"])] == ["a\nb", "", "c\n"]


def test_the_options_are_checked_before_the_first_turn() -> None:
    assert semantic("chat", "--top-p", "2", stdin="Hello!\n").code == 2
    assert semantic("chat", "--system", "", stdin="Hello!\n").code == 2


# After a restart


def chat_with(agent: str, *lines: str, options: tuple[str, ...] = ()) -> Ran:
    """A conversation with an engine of its own, which is closed at the end."""
    return semantic("chat", "--agent", agent, *options, stdin="\n".join(lines) + "\n")


@pytest.mark.exact
@pytest.mark.process
def test_a_conversation_goes_on_in_another_process() -> None:
    """The screen shows where it was, and the end of the input leaves."""
    chat_with("kai", "What is 3 plus 4?", "My name is Kai.")
    with terminal("chat", "--agent", "kai") as screen:
        assert "resuming kai: " in screen.wait_for("last answer 'Nice to meet you, Kai.'")
        screen.wait_for("> ")
        screen.type("What is my name?\n")
        screen.wait_for("Your name is Kai.")
        screen.wait_for("> ")
        screen.type("/usage\n")
        shown = screen.wait_for("store, disk: agents 1, ")
        screen.wait_for("> ")
        screen.type("\x04")
        assert screen.process.wait(60) == 0
    usage = USAGE.search(shown.replace("\r", ""))
    assert usage is not None
    assert int(usage["cached"]) > 20
    assert int(usage["new"]) < 12
    assert "store, memory: " in shown
    assert chat_with("zoe", "What is my name?").out == "You have not told me your name.\n"


def test_a_fork_and_an_import_go_on_as_well(tmp_path: Path) -> None:
    chat_with("kai", "My name is Kai.")
    assert semantic("agents", "fork", "kai", "twin").code == 0
    assert semantic("agents", "export", "twin", str(tmp_path / "twin")).code == 0
    assert semantic("agents", "rm", "kai").code == 0
    assert chat_with("twin", "What is my name?").out == "Your name is Kai.\n"
    assert chat_with("kai", "What is my name?").out == "You have not told me your name.\n"
    there = ("--store", str(tmp_path / "other"))
    assert semantic("agents", "import", str(tmp_path / "twin"), "--as", "far", *there).code == 0
    ran = chat_with("far", "What is my name?", "/usage", options=there)
    assert ran.out.startswith("Your name is Kai.\n")
    usage = USAGE.search(ran.out)
    assert usage is not None
    assert int(usage["cached"]) > 10


def test_new_and_reset_forget_for_good() -> None:
    chat_with("kai", "My name is Kai.")
    unknown = "You have not told me your name.\n"
    assert chat_with("kai", "What is my name?", options=("--new",)).out == unknown
    chat_with("kai", "/reset", "My name is Zoe.", "/reset")
    assert semantic("agents", "ls").out == "no agents\n"
    assert chat_with("kai", "What is my name?").out == unknown


def test_without_a_store_nothing_goes_on() -> None:
    chat_with("kai", "My name is Kai.", options=("--no-store",))
    assert chat_with("kai", "What is my name?").out == "You have not told me your name.\n"


@pytest.mark.parametrize("note", ["", "nonsense", '{"messages": "x"}'])
def test_a_note_that_cannot_be_read_is_no_history(note: str) -> None:
    chat_with("kai", "My name is Kai.")
    changed("kai", note=note)
    ran = chat_with("kai", "What is my name?")
    assert (ran.code, ran.out) == (0, "You have not told me your name.\n")
    assert ran.err == "cannot read the conversation of kai; starting without a history\n"


def test_a_system_message_is_for_the_beginning() -> None:
    system = ("--system", "The user's name is Zoe.")
    chat_with("zoe", "What is 3 plus 4?", options=system)
    assert chat_with("zoe", "What is my name?", options=system).out == "Your name is Zoe.\n"
    assert chat_with("zoe", "What is my name?").out == "Your name is Zoe.\n"
    ran = chat_with("zoe", "Hello!", options=("--system", "Be brief."))
    assert (ran.code, ran.out) == (2, "")
    assert ran.err == "error: it began with another system message; --new starts afresh\n"


def test_why_compares_the_next_turn_with_what_is_there() -> None:
    chat_with("kai", "My name is Kai.")
    ran = semantic("agents", "why", "kai", "--prompt", "What is my name?", "--json")
    document = json.loads(ran.out)["prompt"]
    assert set(document) == {
        "prompt_tokens", "agent_tokens", "common_tokens", "expected", "got", "present",
        "stored_tokens", "n_missing", "expected_text", "got_text",
    }  # fmt: skip
    assert document["common_tokens"] == document["stored_tokens"] == document["agent_tokens"]
    assert (document["present"], document["n_missing"]) == ([True], 0)
    shown = semantic("agents", "why", "kai", "--prompt", "-", stdin="What is my name?\n").out
    assert "all 1 blocks that hold them are there" in shown
    raw = semantic("agents", "why", "kai", "--raw", "--prompt", "<|user|>My dog is Kai.").out
    assert re.search(r"At position \d+ the agent had token \d+ \('.+'\), the prompt has", raw)


# What a line does


@pytest.mark.process
def test_a_turn_that_failed_never_happened(
    engine: Engine, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object, **__: object) -> None:
        raise RuntimeError("device lost")

    talk = session(engine, "unlucky")
    with monkeypatch.context() as failing:
        failing.setattr(MLXBackend, "prefill", broken)
        with pytest.raises(BackendError):
            talk.handle("My name is Kai.")
    capsys.readouterr()
    talk.handle("What is my name?")
    assert capsys.readouterr().out == "You have not told me your name.\n"


@pytest.mark.process
def test_errors_leave_the_conversation_usable(
    engine: Engine, capsys: pytest.CaptureFixture[str]
) -> None:
    talk = session(engine, "wrong")
    with pytest.raises(ContextOverflowError):
        talk.handle("My name is Kai. " * 300)
    for command, words in (
        ("/what now", "unknown command '/what now'; /help lists them"),
        ("/fork", "expected the new agent's NAME after /fork"),
        ("/fork twin", "there is no turn to fork yet"),
        ("/save", "expected a FILE after /save"),
        ("/exit now", "unknown command '/exit now'"),
    ):
        with pytest.raises(InvalidRequestError, match=words):
            talk.handle(command)
    talk.handle("/why")
    talk.handle("/help")
    assert talk.handle("What is 3 plus 4?")
    out = capsys.readouterr().out
    assert out.startswith("no turn yet\n/system [TEXT]")
    assert out.endswith("3 plus 4 is 7.\n")


@pytest.mark.process
def test_a_fork_goes_on_and_its_parent_stays(
    engine: Engine, capsys: pytest.CaptureFixture[str]
) -> None:
    talk = session(engine, "kai")
    for line in ("My name is Kai.", "/fork kai-2", "What is my name?", "/usage"):
        talk.handle(line)
    out = capsys.readouterr().out
    assert out.startswith("Nice to meet you, Kai.\ngoing on as kai-2\nYour name is Kai.\n")
    assert (usage := USAGE.search(out)) is not None
    assert usage["agent"] == "kai-2"
    assert int(usage["new"]) < 12
    assert len(engine.agent("kai").history()) == 2
    with pytest.raises(InvalidRequestError, match="agent 'kai' already exists"):
        talk.handle("/fork kai")


@pytest.mark.process
def test_why_names_the_system_message_that_changed(
    engine: Engine, capsys: pytest.CaptureFixture[str]
) -> None:
    talk = session(engine, "zoe")
    for line in ("/system", "What is 3 plus 4?", "/system The user's name is Zoe.", "/system"):
        talk.handle(line)
    talk.handle("What is my name?")
    talk.handle("/why")
    lines = capsys.readouterr().out.splitlines()
    assert lines[:4] == [
        "no system message", "3 plus 4 is 7.", "The user's name is Zoe.", "Your name is Zoe."
    ]  # fmt: skip
    assert lines[4].startswith("zoe's last prompt: ")
    assert lines[-1].endswith("The system message was added.")


@pytest.mark.process
def test_a_conversation_is_saved_to_a_new_file(engine: Engine, tmp_path: Path) -> None:
    talk = session(engine, "saved")
    talk.handle("My name is Kai.")
    for name in ("talk.json", "talk.md"):
        talk.handle(f"/save {tmp_path / name}")
        with pytest.raises(InvalidRequestError, match="already exists; expected a new file"):
            talk.handle(f"/save {tmp_path / name}")
    assert json.loads((tmp_path / "talk.json").read_text()) == [
        {"role": "user", "content": "My name is Kai."},
        {"role": "assistant", "content": "Nice to meet you, Kai."},
    ]
    expected = "**user**\n\nMy name is Kai.\n\n**assistant**\n\nNice to meet you, Kai.\n"
    assert (tmp_path / "talk.md").read_text() == expected
    with pytest.raises(OperatorError, match=r"cannot write .*: No such file or directory"):
        talk.handle(f"/save {tmp_path / 'no' / 'talk.md'}")


@pytest.mark.parametrize(
    ("text", "whole"),
    [
        ("", 0), ("a", 0), ("a\n", 0), ("a\n\n", 3), ("a\n \nb", 4), ("a\n\nb\n\nc", 6),
        ("```\na\n\nb", 0), ("```\na\n\nb\n```\n\n", 14), ("```\n~~~\n\n", 0),
    ],
)  # fmt: skip
def test_a_block_of_markdown_ends_at_an_empty_line(text: str, whole: int) -> None:
    assert complete_blocks(text) == (text[:whole], text[whole:])


def test_markdown_is_rendered_block_by_block_and_controls_are_shown() -> None:
    shown = io.StringIO()
    console = Console(file=shown, force_terminal=True, width=40, height=10, _environ={})
    with MarkdownWriter(console) as writer:
        writer.thought("Let me think.\x1b[2J")
        for piece in (
            "# Head",
            "ing\n\n",
            "* one\n* two\n\n```\nco",
            "de\n```\n",
            "\x1b]0;x\x07 end",
        ):
            writer.text(piece)
        writer.end(" [cancelled]")
    text = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", shown.getvalue())
    for expected in (
        "Let me think.\\x1b[2J",
        "Heading",
        " • two",
        "code",
        "\\x1b]0;x\\x07 end",
        "[cancelled]",
    ):
        assert expected in text
    assert "\x1b]0" not in shown.getvalue()
    assert shown.getvalue().count("\x1b[?25l") == shown.getvalue().count("\x1b[?25h")


# At a terminal


class Terminal:
    """The screen of a program that runs on a pseudo-terminal."""

    def __init__(self, process: subprocess.Popen[bytes], master: int) -> None:
        self.process = process
        self._master = master
        self._shown = ""

    def type(self, text: str) -> None:
        os.write(self._master, text.encode())

    def interrupt_reading(self) -> None:
        """Ctrl-C as a person is able to: readline shows the prompt before it listens."""
        until(self._is_idle)
        self.process.send_signal(signal.SIGINT)

    def _is_idle(self) -> bool:
        """Whether the main thread waits for something, as for a key."""
        stat = Path("/proc", str(self.process.pid), "stat")
        before = stat.read_text() if stat.exists() else ""
        time.sleep(0.1 if before else 0.5)
        if not before:  # this system does not show what a process does
            return True
        return before.rpartition(") ")[2].startswith("S ") and stat.read_text() == before

    def wait_for(self, text: str) -> str:
        """What was shown up to and with `text`."""
        end = time.monotonic() + 60
        while text not in self._shown:
            left = end - time.monotonic()
            if left <= 0 or not select.select([self._master], [], [], left)[0]:
                raise TimeoutError(f"{text!r} was not shown, but {self._shown!r}")
            self._shown += os.read(self._master, 4096).decode()
        before, _, self._shown = self._shown.partition(text)
        return before + text

    def wait_for_more(self) -> None:
        """Return when something is shown that was not waited for."""
        if not self._shown:
            assert select.select([self._master], [], [], 60)[0]


@contextmanager
def terminal(*arguments: str, kind: str = "dumb") -> Iterator[Terminal]:
    master, slave = pty.openpty()
    with subprocess.Popen(
        command_line(*arguments),
        stdin=slave,
        stdout=slave,
        stderr=slave,
        env={**environment(), "TERM": kind},
        start_new_session=True,
    ) as running:
        os.close(slave)
        try:
            yield Terminal(running, master)
        finally:
            running.kill()
            os.close(master)


@pytest.mark.process
def test_ctrl_c_stops_the_answer_and_keeps_the_conversation(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    talk = session(engine, "cut")
    typed = iter(["My name is Kai.", "Count to 99.", "/what", "What is my name?", "/usage"])

    def write(text: str) -> None:
        print(text, end="")  # noqa: T201
        if text == "3":
            signal.raise_signal(signal.SIGINT)

    def read(prompt: str) -> str:
        del prompt
        try:
            return next(typed)
        except StopIteration:
            raise EOFError from None

    monkeypatch.setattr(answer_writer, "write", write)
    monkeypatch.setattr("builtins.input", read)
    chat._converse(talk)
    shown = capsys.readouterr()
    # The engine may have made a few more tokens by then.
    assert re.search(r"1, 2, 3[\d, ]{0,20} \[cancelled\]\nYour name is Kai.\n", shown.out)
    assert shown.err == "error: unknown command '/what'; /help lists them\n"
    usage = USAGE.search(shown.out)
    assert usage is not None
    assert int(usage["new"]) < 15


@pytest.mark.process
def test_ctrl_c_goes_to_the_answer_and_at_the_prompt_leaves_when_it_is_meant() -> None:
    # So hot, and with such a seed, that it goes on for more than a thousand tokens.
    with terminal("chat", "--max-tokens", "4000", "--temperature", "100", "--seed", "2") as screen:
        screen.wait_for("> ")
        screen.type("Go on.\n")
        screen.wait_for("Go on.\r\n")
        screen.wait_for_more()  # the answer has begun
        screen.process.send_signal(signal.SIGINT)
        screen.wait_for(" [cancelled]\r\n> ")
        screen.type("/usage\n")
        screen.wait_for("last turn")
        screen.wait_for("> ")
        screen.interrupt_reading()
        screen.wait_for("Ctrl-C again, or /exit, ends the conversation.")
        screen.wait_for("> ")
        screen.interrupt_reading()
        assert screen.process.wait(60) == 130


@pytest.mark.process
def test_pasted_lines_are_one_message_and_its_answer_is_markdown() -> None:
    with terminal("chat", kind="xterm") as screen:
        screen.wait_for("> ")
        screen.type("\x1b[200~My name is Kai.\nWhat is my name?\x1b[201~\n")
        screen.wait_for("Your name is Kai.")
        screen.wait_for("> ")
        screen.type("What is \\\n")
        screen.wait_for("... ")
        screen.type("3 plus 4?\n")
        screen.wait_for("is 7.")
        screen.wait_for("> ")
        screen.type("/exit\n")
        assert screen.process.wait(60) == 0


@pytest.mark.process
def test_loading_is_shown_to_a_person_only() -> None:
    with terminal("run", "What is 3 plus 4?", kind="xterm") as screen:
        assert "loading semantic-tiny" in screen.wait_for("3 plus 4 is 7.")
        assert screen.process.wait(60) == 0
