"""Three agents debate: each answers, hears what the others said, and answers again.

They share one briefing: its keys and values are computed once, for the agent that reads it first.
Run: python examples/debate.py [MODEL]. The embedded model only shows what is cached.
"""

from __future__ import annotations

import sys

import semantic

BRIEFING = "Read this: " + " ".join(f"Street {i} has a school and a bridge." for i in range(40))
QUESTION = "Tell me a long story about a bridge."
AGENTS = ("mira", "tomas", "ines")
ROUNDS = 2


def answers(engine: semantic.Engine, asked: dict[str, str], turn: int) -> dict[str, str]:
    """What every agent says next, all of them in one batch."""
    said = engine.run_batch(asked.items(), max_tokens=24)
    for one in said:
        share = f"{one.cached_tokens} of {one.prompt_tokens} prompt tokens were cached"
        print(f"round {turn}, {one.agent}: {one.text!r} ({share})")
    return {one.agent: one.text for one in said}


def main(model: str = "semantic-tiny") -> None:
    """Hold the debate and print each turn."""
    with semantic.Engine(model) as engine:
        answers(engine, {"chair": BRIEFING}, 0)
        for agent in AGENTS:
            engine.agent("chair").fork(agent)
        asked = dict.fromkeys(AGENTS, QUESTION)
        for turn in range(1, ROUNDS + 1):
            said = answers(engine, asked, turn)
            for agent in AGENTS:
                heard = "\n".join(f"{who} says: {said[who]}" for who in AGENTS if who != agent)
                asked[agent] = f"{heard}\n{QUESTION}"


if __name__ == "__main__":
    main(*sys.argv[1:])
