"""The remote tier: blocks, manifests, turns and responses in an object store, sealed.

`remote_store` is the `StorePort`. `reading` looks bodies up and reads them with the help of the
`catalog`, which lists the objects that this process knows. `manifests` stores the manifests of
agents, `names` defines the paths. `objects` reads and writes with deadlines, `sealing` encrypts and
manages keys. `remote_records` stores turns and responses. While it holds the `lease`, `janitor`
evicts objects by the `uses` of all processes. This package is an extra: only `composition` imports
it, and only for a remote store.
"""
