"""A model's chat format: tokenizer, chat template, special tokens and tool-call parsing."""
