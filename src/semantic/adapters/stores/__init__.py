"""Cache stores: memory, disk, both as tiers, write-behind; and small durable records."""
