"""The command line: one file per command. Knows ports and bootstrap; knows nothing about
frameworks."""
