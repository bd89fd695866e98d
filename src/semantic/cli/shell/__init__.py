"""Help and completions, which a shell shows before a command runs."""
