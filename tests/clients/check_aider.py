"""aider, as a program: a question about an empty repository."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from tests.clients import talk

CHAT_VARIABLES = {"OPENAI_API_BASE": "{url}/v1", "OPENAI_API_KEY": "none"}
CHAT = ("aider", "--model", f"openai/{talk.MODEL}", "--no-show-model-warnings")
"""How aider is started with a server of ours; {url} stands for its address."""


def test_a_message_and_its_answer(url: str, tmp_path: Path) -> None:
    program = Path(sys.executable).with_name(CHAT[0])
    variables = {name: value.format(url=url) for name, value in CHAT_VARIABLES.items()}
    done = subprocess.run(
        (
            *(program, *CHAT[1:], "--message", talk.HELLO),
            *("--yes-always", "--no-git", "--no-check-update", "--analytics-disable"),
            *("--no-pretty", "--map-tokens", "0"),
        ),
        cwd=tmp_path,
        env=os.environ | variables,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert re.search(r"Tokens: \d+ sent, [1-9]\d* received", done.stdout), done.stdout
