"""An evaluation harness: many questions after one long prefix, scored by exact match.

The prefix is computed once. `keep=False` leaves nothing of a question behind for the next one.
Run: python examples/evaluation.py [MODEL].
"""

from __future__ import annotations

import sys
from contextlib import closing

from semantic.bootstrap import Settings, build_engine

SHOTS = [
    message
    for x in range(2, 30)
    for message in (
        {"role": "user", "content": f"What is {x} plus {x + 3}?"},
        {"role": "assistant", "content": f"{x} plus {x + 3} is {2 * x + 3}."},
    )
]
TASKS = [(x, y) for x in (12, 25, 38, 47) for y in (4, 16, 31)]


def main(model: str = "semantic-tiny") -> None:
    """Ask all tasks in one batch and print the score."""
    app = build_engine(Settings(model))
    engine, render = app.engine, app.tokenizer.render_chat
    with closing(engine):
        engine.submit("shots", render([*SHOTS, {"role": "user", "content": "What is 1 plus 1?"}]))
        list(engine.step())

        expected = {}
        for x, y in TASKS:
            prompt = render([*SHOTS, {"role": "user", "content": f"What is {x} plus {y}?"}])
            uid = engine.submit(f"task-{x}-{y}", prompt, max_tokens=24, keep=False)
            expected[uid] = f"{x} plus {y} is {x + y}."
        done = list(engine.step())

        for one in done:
            if one.text != expected[one.uid]:
                print(f"{one.agent_id}: expected {expected[one.uid]!r}, got {one.text!r}")
        right = sum(one.text == expected[one.uid] for one in done)
        cached = sum(one.cached_tokens for one in done) / sum(one.prompt_tokens for one in done)
        print(f"{right} of {len(done)} right; {cached:.0%} of the prompt tokens were cached")


if __name__ == "__main__":
    main(*sys.argv[1:])
