"""A long document, asked by twenty agents in one batch: it is computed once, for the first of them.

Each question is a fork of the reader, so that each can be continued without the others' questions.
Run: python examples/long_document.py [MODEL].
"""

from __future__ import annotations

import sys

import semantic

FACTS = "My name is Ada. My favourite colour is teal. I work as a pilot. "
DOCUMENT = FACTS + " ".join(f"Shelf {i} has a lamp and a map of a river." for i in range(80))
QUESTIONS = ("What is my name?", "What is my favourite colour?", "What is my job?")
READERS = 20


def main(model: str = "semantic-tiny") -> None:
    """Let one agent read the document and twenty others ask about it."""
    with semantic.Engine(model) as engine:
        read = engine.chat("reader", DOCUMENT, max_tokens=16)
        print(f"the document has {read.prompt_tokens} tokens; {read.cached_tokens} were cached")

        names = [f"reader-{number}" for number in range(READERS)]
        for name in names:
            engine.agent("reader").fork(name)
        asked = [(name, QUESTIONS[i % len(QUESTIONS)]) for i, name in enumerate(names)]
        answers = engine.run_batch(asked, max_tokens=16)
        for one in answers[: len(QUESTIONS)]:
            print(f"{one.agent}: {one.text!r}")
        prompts = sum(one.prompt_tokens for one in answers)
        cached = sum(one.cached_tokens for one in answers)
        print(f"{READERS} agents: {cached / prompts:.0%} of {prompts} prompt tokens were cached")


if __name__ == "__main__":
    main(*sys.argv[1:])
