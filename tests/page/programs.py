"""The programs that can show the page."""

from typing import Final

PROGRAMS: Final = ("chromium", "chromium-browser", "google-chrome")
