"""KV caches of sequences, in one of two forms, and their bytes as stored blocks.

`contiguous` keeps separate arrays per layer and sequence. `paged` keeps shared page pools. `forms`
chooses between them.
"""
