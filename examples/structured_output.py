"""Structured output over HTTP: the answer follows a JSON schema, whatever the model would say.

`semantic serve` must run; `pip install openai`. A grammar masks what the schema does not permit.
Run: python examples/structured_output.py [URL].
"""

from __future__ import annotations

import json
import sys
from typing import Literal

from openai import APIError, OpenAI
from pydantic import BaseModel

FACTS = "My name is Ada and I live in Oslo. I have a parrot."


class Report(BaseModel):
    """What the answer has."""

    city: Literal["Oslo", "Rome"]
    pets: Literal[0, 1, 2]


def main(url: str = "http://127.0.0.1:8000") -> None:
    """Ask twice for the same object; the second prompt is cached."""
    with OpenAI(base_url=f"{url}/v1", api_key="none") as client:
        schema = {**Report.model_json_schema(), "additionalProperties": False}
        for _ in range(2):
            reply = client.chat.completions.create(
                model="default",
                messages=[{"role": "user", "content": FACTS}],
                max_tokens=600,
                temperature=0,
                response_format={
                    "type": "json_schema",
                    "json_schema": {"name": "report", "schema": schema, "strict": True},
                },
                extra_headers={"X-Agent-ID": "reporter"},
            )
            report = Report(**json.loads(reply.choices[0].message.content or ""))
            usage = reply.usage
            if usage and usage.prompt_tokens_details:
                cached = usage.prompt_tokens_details.cached_tokens
                print(f"{report!r} ({cached} of {usage.prompt_tokens} prompt tokens were cached)")


if __name__ == "__main__":
    try:
        main(*sys.argv[1:])
    except APIError as error:
        sys.exit(f"cannot get an answer from `semantic serve`: {error}")
