"""A fork for each hypothesis: one agent reads the case, and its forks go different ways from there.

A fork copies no keys and values; what its question adds is its own, and the case stays as it was.
Run: python examples/fork_per_hypothesis.py [MODEL].
"""

from __future__ import annotations

import sys

import semantic

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
    with semantic.Engine(model) as engine:
        read = engine.chat("case", CASE, max_tokens=32)
        print(f"case: {read.text!r} ({read.prompt_tokens} prompt tokens computed)")
        for name in HYPOTHESES:
            engine.agent("case").fork(name)
        for step in (0, 1):
            asked = [(name, words[step]) for name, words in HYPOTHESES.items()]
            for one in engine.run_batch(asked, max_tokens=32):
                share = f"{one.cached_tokens} of {one.prompt_tokens} prompt tokens were cached"
                print(f"{one.agent}: {one.text!r} ({share})")


if __name__ == "__main__":
    main(*sys.argv[1:])
