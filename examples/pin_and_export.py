"""Pin an agent, export it to a file, and import it into the store of another machine.

A pinned agent's blocks are not evicted for others; the file has its tokens, keys and values.
Run: python examples/pin_and_export.py.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import semantic

FACTS = "My name is Ada. " + " ".join(f"Shelf {i} has a lamp." for i in range(60))


def show(answer: semantic.Answer) -> None:
    """Print an answer, and what of its prompt was cached."""
    share = f"{answer.cached_tokens} of {answer.prompt_tokens} prompt tokens were cached"
    print(f"{answer.agent}: {answer.text!r} ({share})")


def main() -> None:
    """Answer here, move the agent, and continue there."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "ada.tar")
        with semantic.Engine(store=Path(folder, "here")) as here:
            ada = here.agent("ada")
            show(ada.chat(FACTS, max_tokens=16))
            ada.pin()
            print(f"pinned: {ada.info().summary.pinned}; {ada.export(file)} bytes exported")
        with semantic.Engine(store=Path(folder, "there")) as there:
            moved = there.import_agent(file, "ada-moved")
            show(moved.chat("What is my name?", max_tokens=16))


if __name__ == "__main__":
    main()
