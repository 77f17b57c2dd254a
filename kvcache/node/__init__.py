"""The KV node: one process per worker that owns host memory, files and the data path.

Contract of this folder: shells around ``kvcache.core``; nothing of an engine. ``node`` joins ``tiers`` (``host_tier``,
``disk``), ``policy``, ``exchange`` between nodes (``data_path``, ``data_pull``, ``data_bytes``) and the ``socket`` of the
engines.
"""
