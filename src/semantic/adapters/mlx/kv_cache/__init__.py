"""KV caches of sequences, in one of two forms, and their bytes as stored blocks.

`contiguous` keeps each layer of each sequence in arrays of its own; `paged` keeps all sequences in
shared page pools. `forms` chooses the form for a model and a device.
"""
