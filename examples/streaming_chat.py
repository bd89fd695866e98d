"""A streaming chat over HTTP with OpenAI's SDK: text as it comes, then what was cached.

`semantic serve` must run. From the second turn on only what is new is computed.
Run: python examples/streaming_chat.py [URL], and type; an empty line ends it.
"""

from __future__ import annotations

import sys

from openai import OpenAI
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


def main(url: str = "http://127.0.0.1:8000") -> None:
    """Chat until an empty line."""
    with OpenAI(base_url=f"{url}/v1", api_key="none") as client:
        messages: list[ChatCompletionMessageParam] = []
        while text := input("> ").strip():
            messages.append({"role": "user", "content": text})
            messages.append({"role": "assistant", "content": turn(client, messages)})


if __name__ == "__main__":
    main(*sys.argv[1:])
