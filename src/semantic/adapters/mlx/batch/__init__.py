"""Continuous batching: sequences join and leave the decode batch between steps.

`decode_batch` has the protocol of a decode batch, and the batch for our caches (ragged, without
padding). `padded_batch` and `generator_batch` decode with mlx-lm's padded caches; `padded_batch`
also chooses between the batches.
"""
