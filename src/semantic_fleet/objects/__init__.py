"""The remote tier: blocks, manifests, turns and responses in an object store, sealed.

`remote_store` is the `StorePort`: `reading` finds bodies and reads them, by the `catalog` of what
is known here; `manifests` has those of agents, `names` where all objects are. `objects` reads and
writes with deadlines, `sealing` encrypts, derives and deletes keys. `remote_records` has turns and
responses. `janitor` evicts, while it has the `lease`, by the `uses` of all processes. An extra of
the package: only `composition` imports it, and only for a remote store.
"""
