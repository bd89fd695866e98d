"""Turns conversations into tokens, and generated text into answers."""
