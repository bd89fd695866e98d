"""The `semantic` program, also as `python -m semantic`."""

import os
import signal
import sys

_INTERRUPTED = 130


def main() -> None:
    """Run the program. Ctrl-C ends it without a traceback, also while Python imports modules."""
    is_heeded = signal.getsignal(signal.SIGINT) is signal.default_int_handler  # not under nohup
    if is_heeded:
        # An exception would interrupt imports, and some of their errors hide it.
        signal.signal(signal.SIGINT, lambda *_: os._exit(_INTERRUPTED))
    from semantic.cli.main import main as run

    try:
        if is_heeded:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        run()
    except KeyboardInterrupt:
        sys.exit(_INTERRUPTED)


if __name__ == "__main__":
    main()
