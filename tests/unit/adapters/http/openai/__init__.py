"""The wires of OpenAI's clients."""
