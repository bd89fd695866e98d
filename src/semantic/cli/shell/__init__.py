"""What a shell shows before a command runs: its help, and completions of what is being typed."""
