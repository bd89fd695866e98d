"""A tree of subagents over HTTP: each begins with what its parent has read, by a fork.

`semantic serve` must run; `pip install openai`. At the end the server forgets the family.
Run: python examples/subagent_tree.py [URL].
"""

from __future__ import annotations

import sys

from openai import APIError, OpenAI
from openai.types.chat import ChatCompletionMessageParam

BRIEFING = "My name is Ada and I live in Oslo. " + "The river is near the old bridge. " * 30
TASKS = {"tests": "What is my name?", "docs": "Where do I live?", "browser": "What is 3 plus 4?"}
PARENTS = {"tests": "lead", "docs": "lead", "browser": "tests"}

Messages = list[ChatCompletionMessageParam]


def ask(client: OpenAI, agent: str, messages: Messages) -> Messages:
    """The conversation with the agent's answer; prints what was cached."""
    reply = client.chat.completions.create(
        model="default", messages=messages, max_tokens=24, extra_headers={"X-Agent-ID": agent}
    )
    text = reply.choices[0].message.content or ""
    usage = reply.usage
    details = usage.prompt_tokens_details if usage else None
    if usage and details:
        share = f"{details.cached_tokens} of {usage.prompt_tokens} prompt tokens were cached"
        print(f"{agent}: {text!r} ({share})")
    return [*messages, {"role": "assistant", "content": text}]


def print_tree(client: OpenAI) -> None:
    """The family of the lead."""
    family = client.get("/agents/lead/family", cast_to=dict[str, list[dict[str, object]]])
    for agent in family["data"]:
        print(f"{'  ' * int(str(agent['depth']))}{agent['id']} ({agent['tokens']} tokens)")


def main(url: str = "http://127.0.0.1:8000") -> None:
    """Brief the lead, fork its subagents, and give each its task."""
    with OpenAI(base_url=f"{url}/v1", api_key="none") as client:
        chats = {"lead": ask(client, "lead", [{"role": "user", "content": BRIEFING}])}
        for name, task in TASKS.items():
            parent = PARENTS[name]
            client.post(f"/agents/{parent}/fork", body={"new_id": name}, cast_to=object)
            chats[name] = ask(client, name, [*chats[parent], {"role": "user", "content": task}])
        print_tree(client)
        client.delete("/agents/lead?family=true", cast_to=object)


if __name__ == "__main__":
    try:
        main(*sys.argv[1:])
    except APIError as error:
        sys.exit(f"cannot get an answer from `semantic serve`: {error}")
