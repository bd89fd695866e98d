"""Help and completions that a shell shows before a command runs."""
