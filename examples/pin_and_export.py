"""Pin an agent, export it to two files, and import it into the store of another machine.

A pinned agent's blocks are not evicted for others; the files have its tokens, keys and values.
Run: python examples/pin_and_export.py.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from contextlib import closing
from pathlib import Path

from semantic.bootstrap import Settings, build_engine

FACTS = "My name is Ada. " + " ".join(f"Shelf {i} has a lamp." for i in range(60))


def ask(store: Path, agent: str, text: str) -> None:
    """One turn of `agent`, after all that the store has of it."""
    app = build_engine(Settings(use_disk=True, store=store))
    with closing(app.engine):
        saved = app.engine.manifest(agent)
        past = saved.token_ids if saved else ()
        turn = app.tokenizer.render_chat([{"role": "user", "content": text}])
        app.engine.submit(agent, (*past, *turn), max_tokens=16)
        for done in app.engine.step():
            share = f"{done.cached_tokens} of {done.prompt_tokens} prompt tokens were cached"
            print(f"{agent}: {done.text!r} ({share})")


def agents(store: Path, *arguments: str) -> None:
    """Run a command of `semantic agents`; it prints what it did."""
    command = (sys.executable, "-m", "semantic", "agents", *arguments, "--store", str(store))
    subprocess.run(command, check=True)


def main() -> None:
    """Answer here, move the agent, and continue there."""
    with tempfile.TemporaryDirectory() as folder:
        here, there, files = Path(folder, "here"), Path(folder, "there"), Path(folder, "ada")
        ask(here, "ada", FACTS)
        agents(here, "pin", "ada")
        agents(here, "export", "ada", str(files))
        agents(there, "import", str(files), "--as", "ada-moved")
        ask(there, "ada-moved", "What is my name?")


if __name__ == "__main__":
    main()
