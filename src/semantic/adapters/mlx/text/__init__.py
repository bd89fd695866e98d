"""Text in and out of a model: tokenizer, chat template, tool-call parsing."""
