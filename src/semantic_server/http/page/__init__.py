"""The page at /: its files, and what it shows as JSON and as one stream of events."""
