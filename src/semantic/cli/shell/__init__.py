"""The help and the completions that a shell shows before a command runs."""
