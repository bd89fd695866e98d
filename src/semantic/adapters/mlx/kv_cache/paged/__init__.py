"""Paged KV caches: page pools that all sequences share, and attention kernels that read them.

For devices with kernels that passed their self-test. Joining, leaving, restoring and sharing are
edits of page tables. Attention reads exactly the existing tokens (no padding).

- kind: the layers of a model with equal shapes and windows. They share a pool and page tables.
- page: 256 tokens of all layers of one kind, keys and values. A pool allocates whole pages.
- block: one layer's share of a page; the unit that the engine counts and a store keeps.
- page pool: one array of pages of a kind, with a free list and reference counts.
- page table: the pages of one sequence for one kind. With a sliding window it is a ring.
- copy-on-write: `layers` copies a shared page before a write; others only read it.
- split-KV: thread groups share a row's tokens, and a kernel combines their partial results.
"""
