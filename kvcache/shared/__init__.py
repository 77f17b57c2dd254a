"""The index that nodes share in Redis: hotness and metadata of spans. Lost or frozen, everything goes on without it."""
