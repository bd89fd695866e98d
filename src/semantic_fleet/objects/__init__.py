"""The remote tier: blocks, manifests, turns and responses in an object store, sealed.

`remote_store` is the `StorePort`. `reading` looks bodies up and reads them with the help of the
`catalog`, the objects that this process knows of. `manifests` holds those of agents, `names` the
paths. `objects` reads and writes with deadlines, `sealing` encrypts and manages keys.
`remote_records` holds turns and responses. `janitor` evicts while it holds the `lease`, by the
`uses` of all processes. An extra of the package: only `composition` imports it, and only for a
remote store.
"""
