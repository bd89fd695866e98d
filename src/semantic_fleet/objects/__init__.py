"""The remote tier: encrypted blocks, agents, turns and responses in an object store. `remote_store`
is the `StorePort`. This package needs the extra `fleet`."""
