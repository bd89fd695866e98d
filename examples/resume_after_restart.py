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
from contextlib import closing
from pathlib import Path

from semantic.bootstrap import App, Settings, build_engine

FIRST = "My name is Ada. " + " ".join(f"Shelf {i} has a lamp." for i in range(60))
SECOND = "What is my name?"


def open_app(folder: str) -> App:
    """An engine whose caches outlive the process."""
    return build_engine(Settings(use_disk=True, store=Path(folder)))


def answer(app: App, text: str) -> None:
    """One turn of the agent, after the tokens of its manifest."""
    saved = app.engine.manifest("ada")
    past = saved.token_ids if saved else ()
    turn = app.tokenizer.render_chat([{"role": "user", "content": text}])
    app.engine.submit("ada", (*past, *turn), max_tokens=16)
    for done in app.engine.step():
        share = f"{done.cached_tokens} of {done.prompt_tokens} prompt tokens were cached"
        source = done.match.source if done.match else "none"
        print(f"{os.getpid()}: {done.text!r} ({share}, from {source})", flush=True)


def main(folder: str | None = None) -> None:
    """With `folder`: the first process, which is killed. Else the second, which starts it."""
    if folder is not None:
        app = open_app(folder)
        answer(app, FIRST)
        app.engine.flush()
        os.kill(os.getpid(), signal.SIGKILL)
    with tempfile.TemporaryDirectory() as new:
        subprocess.run((sys.executable, __file__, new), check=False)
        app = open_app(new)
        with closing(app.engine):
            answer(app, SECOND)


if __name__ == "__main__":
    main(*sys.argv[1:])
