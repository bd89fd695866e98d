"""Continuous batching: sequences join and leave the decode batch between steps.

`decode_batch` defines the protocol and the batch for our caches (ragged, no padding). The other
modules decode with mlx-lm's padded caches; `padded_batch` also chooses a model's batch.
"""
