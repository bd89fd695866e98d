"""aider, as a program: a question about an empty repository."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from tests.clients import talk


def test_a_message_and_its_answer(url: str, tmp_path: Path) -> None:
    program = Path(sys.executable).with_name("aider")
    done = subprocess.run(
        (
            *(program, "--model", f"openai/{talk.MODEL}", "--message", talk.HELLO),
            *("--yes-always", "--no-git", "--no-check-update", "--analytics-disable"),
            *("--no-show-model-warnings", "--no-pretty", "--map-tokens", "0"),
        ),
        cwd=tmp_path,
        env=os.environ | {"OPENAI_API_BASE": f"{url}/v1", "OPENAI_API_KEY": "none"},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert re.search(r"Tokens: \d+ sent, [1-9]\d* received", done.stdout), done.stdout
