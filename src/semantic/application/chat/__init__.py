"""Conversations as they become tokens and answers: templates, replay, tool calls, answer text."""
