"""A batch file: every line of a JSON Lines file is a request, and all are answered in one batch.

A line has `agent`, `prompt` and optionally `max_tokens`; answers are printed as JSON, in order.
Run: python examples/batch_file.py [FILE]. `semantic run --file` does the same with more options.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import semantic


def request(line: str) -> semantic.Request:
    """The request of one line."""
    fields = json.loads(line)
    most = fields.get("max_tokens", 32)
    return semantic.Request(fields["agent"], fields["prompt"], {"max_tokens": most})


EXAMPLE = Path(__file__).with_name("batch.jsonl")


def main(file: str | Path = EXAMPLE) -> None:
    """Answer all lines of the file."""
    requests = [request(line) for line in Path(file).read_text().splitlines() if line]
    with semantic.Engine() as engine:
        for one in engine.run_batch(requests):
            answer = {"agent": one.agent, "text": one.text, "reason": one.finish_reason}
            print(json.dumps({**answer, "prompt": one.prompt_tokens, "cached": one.cached_tokens}))


if __name__ == "__main__":
    main(*sys.argv[1:])
