"""A streaming chat over HTTP with OpenAI's SDK: text as it comes, then what was cached.

`semantic serve` must run; `pip install openai`. Later turns compute only what is new.
Run: python examples/streaming_chat.py [URL], and type; Ctrl-D or an empty line ends it.
"""

from __future__ import annotations

import sys

from openai import APIError, OpenAI
from openai.types.chat import ChatCompletionMessageParam


def turn(client: OpenAI, messages: list[ChatCompletionMessageParam]) -> str:
    """Print the answer while it is generated; return it."""
    stream = client.chat.completions.create(
        model="default",
        messages=messages,
        max_tokens=64,
        stream=True,
        stream_options={"include_usage": True},
        extra_headers={"X-Agent-ID": "chat"},
    )
    answer = ""
    for chunk in stream:
        for choice in chunk.choices:
            answer += choice.delta.content or ""
            print(choice.delta.content or "", end="", flush=True)
        if chunk.usage and chunk.usage.prompt_tokens_details:
            cached = chunk.usage.prompt_tokens_details.cached_tokens
            print(f"\n({cached} of {chunk.usage.prompt_tokens} prompt tokens were cached)")
    return answer


def typed() -> str:
    """The next line of the user, "" at the end."""
    try:
        return input("> ").strip()
    except (EOFError, KeyboardInterrupt):
        print()
        return ""


def main(url: str = "http://127.0.0.1:8000") -> None:
    """Chat until an empty line."""
    with OpenAI(base_url=f"{url}/v1", api_key="none") as client:
        messages: list[ChatCompletionMessageParam] = []
        while text := typed():
            messages.append({"role": "user", "content": text})
            messages.append({"role": "assistant", "content": turn(client, messages)})


if __name__ == "__main__":
    try:
        main(*sys.argv[1:])
    except APIError as error:
        sys.exit(f"cannot get an answer from `semantic serve`: {error}")
