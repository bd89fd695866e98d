"""The command line: one file per command. Knows ports and bootstrap, not frameworks."""
