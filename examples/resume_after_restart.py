"""Resume after a restart: a process answers and is killed; another one continues the conversation.

Keys and values come from the store on disk, as after a reboot. Only the new question is computed.
Run: python examples/resume_after_restart.py.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile

import semantic

FIRST = "My name is Ada. " + " ".join(f"Shelf {i} has a lamp." for i in range(60))
SECOND = "What is my name?"


def answer(engine: semantic.Engine, text: str) -> None:
    """One turn of the agent."""
    one = engine.chat("ada", text, max_tokens=16)
    share = f"{one.cached_tokens} of {one.prompt_tokens} prompt tokens were cached"
    source = one.usage.match.source if one.usage.match else "none"
    print(f"{os.getpid()}: {one.text!r} ({share}, from {source})", flush=True)


def main(folder: str | None = None) -> None:
    """With `folder`: the first process, which is killed. Else the second, which starts it."""
    if folder is not None:
        engine = semantic.Engine(store=folder)
        answer(engine, FIRST)
        engine.flush()
        os.kill(os.getpid(), signal.SIGKILL)
    with tempfile.TemporaryDirectory() as new:
        subprocess.run((sys.executable, __file__, new), check=False)
        with semantic.Engine(store=new) as engine:
            answer(engine, SECOND)


if __name__ == "__main__":
    main(*sys.argv[1:])
