"""Small records in one SQLite file each, which survive the process."""
