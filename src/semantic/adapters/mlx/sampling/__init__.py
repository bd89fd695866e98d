"""Samplers, penalties, logit bias, constrained decoding and log-probabilities."""
