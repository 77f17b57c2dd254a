"""KV cache outside the engine: a tier in host memory, a tier on disk, an index of who holds what, and its hotness.

Contract of this folder. A *block* is the KV of ``block_size`` tokens in all layers, one page of the engine's own cache. A
*page* is 64 KiB of host memory or of a file; a block takes as many as it needs. A *span* is the run of blocks that covers
256 tokens, the unit of the index; it is named by the hash of its last block. Hashes are those of ``profiles.blocks``.

One *node* process per worker owns the tiers of its host: ``node`` (shell), ``node_tiers`` (both tiers as one) over
``host_tier`` and ``store``, the ``.kvc`` files (``kvc_format`` is their layout, ``segments`` their IO, ``chunks`` what goes
in and out, ``rooms`` and ``tidying`` who has which room, ``kept_budget`` what may be written a day). ``codecs`` is how a
block is written there, ``precision`` which precision may serve which other (``node_precision`` asks it when a prompt is
prepared). Engines reach the node through ``client`` over a socket of that host (``node_socket``), other nodes over
``data_path`` and ``data_pull``. ``vllm_connector`` is the engine's side. ``redis_index`` shares the hotness with other
nodes.
``core`` decides, without IO: what is hot, who goes first, who holds a prefix, whether fetching beats computing.

Whatever fails in here costs time, never text: a block that cannot be read and verified in time is computed again.
"""
