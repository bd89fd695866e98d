"""What the tests share: tiny models, the reference, fakes at our own ports."""
