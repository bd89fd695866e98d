"""A process that resumes saved agents of tiny models; each answer must equal mlx-lm's.

    python -m tests.support.durable_resume FOLDER ARCHITECTURE...

Prints for the agent "ann" of each FOLDER/ARCHITECTURE: a digest of what
was restored, tokens it had, tokens reused, from where.
"""

from __future__ import annotations

import sys
from pathlib import Path

from tests.support.durable import digest_of, running


def main(folder: str, *architectures: str) -> None:
    """See the module."""
    for architecture in architectures:
        with running(architecture, Path(folder, architecture)) as life:
            past = life.manifest("ann").token_ids
            restored = digest_of(life.restored_bodies("ann"))
            # Printed first, so that a wrong answer shows whether its bytes were right.
            sys.stderr.write(f"{architecture} restored {restored}\n")
            done = life.ask("ann", (*past, 1, 2, 3), 8)
            assert done.match is not None
            fields = architecture, restored, len(past), done.cached_tokens, done.match.source
            sys.stdout.write("\t".join(map(str, fields)) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
