"""Paged KV caches: page pools that all sequences share, and attention kernels that read them.

Used where the device has kernels that passed their self-test. Joining, leaving, restoring and
sharing are edits of page tables; attention reads exactly the tokens that exist (no padding).

- kind: the layers of a model with equal shapes and windows. They share a pool and page tables.
- page: 256 tokens of all layers of one kind, keys and values. A pool allocates whole pages.
- block: one layer's share of a page; what the engine counts and a store keeps.
- page pool: one array of pages of a kind, with a free list and reference counts.
- page table: the pages of one sequence for one kind. With a sliding window it is a ring.
- copy-on-write: shared pages are read only; `layers` copies a page before it is written to.
- split-KV: a row's tokens are divided among thread groups and their partial results combined.
"""
