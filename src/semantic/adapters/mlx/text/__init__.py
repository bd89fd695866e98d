"""Chat format of a model: tokenizer, chat template, special tokens, tool-call parsing."""
