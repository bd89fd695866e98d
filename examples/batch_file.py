"""A batch file: every line of a JSON Lines file is a request, and all are answered in one batch.

A line has `agent`, `prompt` and optionally `max_tokens`; answers are printed as JSON, in order.
Run: python examples/batch_file.py FILE. `semantic run --file` does the same with more options.
"""

from __future__ import annotations

import json
import sys
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from semantic.bootstrap import Settings, build_engine


@dataclass(frozen=True)
class Line:
    """One request of the file."""

    agent: str
    prompt: str
    max_tokens: int = 32


def main(file: str) -> None:
    """Answer all lines of the file."""
    lines = [Line(**json.loads(text)) for text in Path(file).read_text().splitlines() if text]
    app = build_engine(Settings())
    with closing(app.engine):
        uids = [
            app.engine.submit(
                line.agent,
                app.tokenizer.render_chat([{"role": "user", "content": line.prompt}]),
                max_tokens=line.max_tokens,
            )
            for line in lines
        ]
        answers = {done.uid: done for done in app.engine.step()}
    for uid in uids:
        done = answers[uid]
        answer = {"agent": done.agent_id, "text": done.text, "reason": done.finish_reason}
        print(json.dumps({**answer, "prompt": done.prompt_tokens, "cached": done.cached_tokens}))


if __name__ == "__main__":
    main(sys.argv[1])
