"""A process in which the agent "ann" of tiny models answers; each answer must equal mlx-lm's.

    python -m tests.support.durable_resume FOLDER ARCHITECTURE...

Prints for each FOLDER/ARCHITECTURE: a digest of what the store had of the agent when the process
began, tokens it had, tokens reused, from where, and a digest of what it has now. Then it waits
with open stores for the end of its input, or to be killed.
"""

from __future__ import annotations

import sys
from contextlib import ExitStack
from pathlib import Path

from tests.support.durable import digest_of, running, text


def main(folder: str, *architectures: str) -> None:
    """See the module."""
    with ExitStack() as lives:
        for architecture in architectures:
            life = lives.enter_context(running(architecture, Path(folder, architecture)))
            known = life.engine.manifest("ann")
            past = text(560, seed=1) if known is None else known.token_ids
            restored = "" if known is None else digest_of(life.restored_bodies("ann"))
            # Printed first, so that a wrong answer shows whether its bytes were right.
            sys.stderr.write(f"{architecture} restored {restored}\n")
            done = life.ask("ann", (*past, 1, 2, 3), 8)
            assert done.match is not None
            life.engine.flush()
            fields = (restored, len(past), done.cached_tokens, done.match.source)
            said = (architecture, *fields, digest_of(life.bodies("ann")))
            sys.stdout.write("\t".join(map(str, said)) + "\n")
        sys.stdout.flush()
        sys.stdin.read()


if __name__ == "__main__":
    main(*sys.argv[1:])
