"""An evaluation harness: many questions after one long prefix, scored by exact match.

The prefix is computed once. `keep=False` leaves nothing of a question behind for the next one.
Run: python examples/evaluation.py [MODEL].
"""

from __future__ import annotations

import sys

import semantic

SHOTS = [
    message
    for x in range(2, 30)
    for message in (
        semantic.Message("user", f"What is {x} plus {x + 3}?"),
        semantic.Message("assistant", f"{x} plus {x + 3} is {2 * x + 3}."),
    )
]
TASKS = [(x, y) for x in (12, 25, 38, 47) for y in (4, 16, 31)]


def main(model: str = "semantic-tiny") -> None:
    """Ask all tasks in one batch and print the score."""
    with semantic.Engine(model) as engine:
        engine.chat("shots", [*SHOTS, semantic.Message("user", "What is 1 plus 1?")])
        asked = [
            (f"task-{x}-{y}", [*SHOTS, semantic.Message("user", f"What is {x} plus {y}?")])
            for x, y in TASKS
        ]
        answers = engine.run_batch(asked, max_tokens=24, keep=False)

        right = 0
        for one, (x, y) in zip(answers, TASKS, strict=True):
            expected = f"{x} plus {y} is {x + y}."
            right += one.text == expected
            if one.text != expected:
                print(f"{one.agent}: expected {expected!r}, got {one.text!r}")
        cached = sum(one.cached_tokens for one in answers)
        share = cached / sum(one.prompt_tokens for one in answers)
        print(f"{right} of {len(answers)} right; {share:.0%} of the prompt tokens were cached")


if __name__ == "__main__":
    main(*sys.argv[1:])
