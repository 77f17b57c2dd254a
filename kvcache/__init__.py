"""KV cache outside the engine: a tier in host memory, a tier on disk, an index of who holds what, and its hotness.

Contract of this folder. A *block* is the KV of ``block_size`` tokens in all layers, one page of the engine's own cache. A
*page* is 64 KiB of host memory or of a file; a block takes as many as it needs. A *span* is the run of blocks that covers
256 tokens, the unit of the index; it is named by the hash of its last block. Hashes are those of ``profiles.blocks``.

One *node* process per worker owns the tiers of its host (``node/``: host memory, disk, exchange with other nodes) over the
``.kvc`` files (``store/``). ``codec/`` is how a block is written there, and which precision may serve which other. Engines
reach the node over a socket of that host (``wire/``); ``engine/`` is vLLM's side. ``shared/`` shares hotness in Redis.
``core`` decides, without IO: what is hot, who goes first, who holds a prefix, whether fetching beats computing.

Whatever fails in here costs time, never text: a block that cannot be read and verified in time is computed again.
"""
