"""The engine and its policies, on fakes."""
