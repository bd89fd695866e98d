"""`python -m semantic` is the same as `semantic`."""

from semantic.cli.main import main

main()
