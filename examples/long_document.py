"""A long document, asked by twenty agents in one batch: it is computed once, for the first of them.

Each question is an agent of its own, so that each can be continued without the others' questions.
Run: python examples/long_document.py [MODEL].
"""

from __future__ import annotations

import sys
from contextlib import closing

from semantic.bootstrap import Settings, build_engine

FACTS = "My name is Ada. My favourite colour is teal. I work as a pilot. "
DOCUMENT = FACTS + " ".join(f"Shelf {i} has a lamp and a map of a river." for i in range(80))
QUESTIONS = ("What is my name?", "What is my favourite colour?", "What is my job?")
READERS = 20


def main(model: str = "semantic-tiny") -> None:
    """Let one agent read the document and twenty others ask about it."""
    app = build_engine(Settings(model))
    engine, render = app.engine, app.tokenizer.render_chat
    with closing(engine):
        document = [{"role": "user", "content": DOCUMENT}]
        engine.submit("reader", render(document), max_tokens=16)
        (read,) = engine.step()
        print(f"the document has {read.prompt_tokens} tokens; {read.cached_tokens} were cached")
        document.append({"role": "assistant", "content": read.text})

        for number in range(READERS):
            question = {"role": "user", "content": QUESTIONS[number % len(QUESTIONS)]}
            engine.submit(f"reader-{number}", render([*document, question]), max_tokens=16)
        done = list(engine.step())
        for one in sorted(done, key=lambda one: one.agent_id)[: len(QUESTIONS)]:
            print(f"{one.agent_id}: {one.text!r}")
        prompts = sum(one.prompt_tokens for one in done)
        cached = sum(one.cached_tokens for one in done)
        print(f"{len(done)} agents: {cached / prompts:.0%} of {prompts} prompt tokens were cached")


if __name__ == "__main__":
    main(*sys.argv[1:])
