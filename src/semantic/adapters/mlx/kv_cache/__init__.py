"""KV caches of sequences, and their conversion to the bytes of stored blocks.

`contiguous` keeps separate arrays per layer and sequence. `paged` keeps shared page pools. `forms`
chooses between them.
"""
