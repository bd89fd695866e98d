"""The engine and its policies. Standard library only: models and stores arrive through ports."""
