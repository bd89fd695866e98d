"""Three agents debate: each answers, hears what the others said, and answers again.

They share one briefing: its keys and values are computed once, for the agent that reads it first.
Run: python examples/debate.py [MODEL]. The embedded model only shows what is cached.
"""

from __future__ import annotations

import sys
from contextlib import closing

from semantic.bootstrap import App, Settings, build_engine

BRIEFING = "Read this: " + " ".join(f"Street {i} has a school and a bridge." for i in range(40))
QUESTION = "Tell me a long story about a bridge."
AGENTS = ("mira", "tomas", "ines")
ROUNDS = 2

Message = dict[str, str]


def answers(app: App, chats: dict[str, list[Message]], turn: int) -> dict[str, str]:
    """What every agent says next, all of them in one batch."""
    found = {}
    for agent, messages in chats.items():
        app.engine.submit(agent, app.tokenizer.render_chat(messages), max_tokens=24)
    for done in app.engine.step():
        found[done.agent_id] = done.text
        share = f"{done.cached_tokens} of {done.prompt_tokens} prompt tokens were cached"
        print(f"round {turn}, {done.agent_id}: {done.text!r} ({share})")
    return found


def main(model: str = "semantic-tiny") -> None:
    """Hold the debate and print each turn."""
    app = build_engine(Settings(model))
    with closing(app.engine):
        briefed: list[Message] = [{"role": "user", "content": BRIEFING}]
        (read,) = answers(app, {"chair": briefed}, 0).values()
        briefed.append({"role": "assistant", "content": read})
        asked: Message = {"role": "user", "content": QUESTION}
        chats = {agent: [*briefed, asked] for agent in AGENTS}
        for turn in range(1, ROUNDS + 1):
            said = answers(app, chats, turn)
            for agent, messages in chats.items():
                heard = "\n".join(f"{who} says: {said[who]}" for who in AGENTS if who != agent)
                messages.append({"role": "assistant", "content": said[agent]})
                messages.append({"role": "user", "content": f"{heard}\n{QUESTION}"})


if __name__ == "__main__":
    main(*sys.argv[1:])
