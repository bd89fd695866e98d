"""Paged KV caches: page pools that all sequences share, and attention kernels that read them.

Joining, leaving, restoring and sharing only edit page tables.

- kind: layers of a model with equal shapes and windows, which share a pool and page tables.
- page: keys and values of 256 tokens for all layers of one kind.
- block: one layer's part of a page; the unit that the engine counts and a store keeps.
- page pool: one array with all pages of a kind, with a free list and reference counts.
- page table: the pages of one sequence for one kind. With a sliding window it is a ring.
- copy-on-write: `layers` copies a shared page before a write.
- split-KV: thread groups divide a row's tokens, and a kernel combines their results.
"""
