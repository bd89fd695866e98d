"""The `semantic` program, also as `python -m semantic`."""

import sys


def main() -> None:
    """Run the program. Ctrl-C while Python imports modules ends the program without a traceback."""
    try:
        from semantic.cli.main import main as run
    except KeyboardInterrupt:
        sys.exit(130)
    run()


if __name__ == "__main__":
    main()
