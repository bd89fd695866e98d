"""Conversations on their way into tokens and back: templates, replay, tool calls, answers."""
