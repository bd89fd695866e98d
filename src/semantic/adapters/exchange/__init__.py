"""Agents as files, for moving them between stores."""
