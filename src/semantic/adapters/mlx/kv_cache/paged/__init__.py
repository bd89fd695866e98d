"""The block pool read in place: caches whose pages lie in one array per kind of layer.

Joining, leaving, restoring and sharing are edits of tables; attention reads exactly the tokens
that exist. Used where the device has kernels that passed their test.
"""
