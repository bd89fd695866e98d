"""The plan's own model, SmolLM2-135M-Instruct: `make real`, which fetches it. Slow."""
