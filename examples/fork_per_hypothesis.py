"""A fork for each hypothesis: one agent reads the case, and its forks go different ways from there.

A fork copies no keys and values; what its question adds is its own, and the case stays as it was.
Run: python examples/fork_per_hypothesis.py [MODEL].
"""

from __future__ import annotations

import sys
from contextlib import closing

from semantic.bootstrap import Settings, build_engine

CASE = (
    "My name is Ada and I live in Oslo. I have a parrot. My hobby is chess. "
    "My favourite food is ramen. I work as a pilot. Remember the code velvet 42."
)
HYPOTHESES = {
    "moved": ("Actually, my city is Rome now.", "Where do I live?"),
    "renamed": ("Actually, my name is Vera now.", "What is my name?"),
    "unchanged": ("What is 3 plus 4?", "What is my name and my city?"),
}


def main(model: str = "semantic-tiny") -> None:
    """Fork the case once for each hypothesis and print what each fork answers."""
    app = build_engine(Settings(model))
    engine, render = app.engine, app.tokenizer.render_chat
    with closing(engine):
        case = [{"role": "user", "content": CASE}]
        engine.submit("case", render(case), max_tokens=32)
        (read,) = engine.step()
        case.append({"role": "assistant", "content": read.text})
        print(f"case: {read.text!r} ({read.prompt_tokens} prompt tokens computed)")

        chats = {name: list(case) for name in HYPOTHESES}
        for name in HYPOTHESES:
            engine.fork("case", name)
        for step in (0, 1):
            for name, words in HYPOTHESES.items():
                chats[name].append({"role": "user", "content": words[step]})
                engine.submit(name, render(chats[name]), max_tokens=32)
            for done in engine.step():
                chats[done.agent_id].append({"role": "assistant", "content": done.text})
                share = f"{done.cached_tokens} of {done.prompt_tokens} prompt tokens were cached"
                print(f"{done.agent_id}: {done.text!r} ({share})")


if __name__ == "__main__":
    main(*sys.argv[1:])
