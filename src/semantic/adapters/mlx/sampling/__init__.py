"""From logits to a token: samplers, penalties, logit bias, constrained decoding, logprobs."""
