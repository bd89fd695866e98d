"""Paged KV caches: page pools that all sequences share, and attention kernels that read them.

Used on devices whose kernels pass a self-test. Joining, leaving, restoring and sharing only edit
page tables. Attention reads exactly the existing tokens (no padding).

- kind: those layers of a model that have equal shapes and windows. They share pool and page tables.
- page: keys and values of 256 tokens for all layers of one kind. A pool allocates whole pages.
- block: one layer's share of a page; the unit that the engine counts and a store keeps.
- page pool: one array with all pages of a kind, with a free list and reference counts.
- page table: the pages of one sequence for one kind. With a sliding window it is a ring.
- copy-on-write: `layers` copies a shared page before a write; all other modules only read it.
- split-KV: thread groups share a row's tokens, and a kernel combines their partial results.
"""
