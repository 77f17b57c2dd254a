"""What the KV tiers decide, without IO, clock or randomness; the time is passed in.

``identity`` (whose KV may stand for whose), ``hotness`` and ``chains`` (KVC-2, KVC-3), ``eviction`` (who goes first) and
``returns`` (what a place is worth), ``holdings`` (what a node has in both tiers, and which spans to tell of), ``shelf``
(what the store on disk has, and what it may write), ``fetching`` (fetch or compute again), ``migration`` (what a target
lacks), ``prefix_index`` (which holder has how much of a prefix), ``index_buffer`` (what waits for the shared index, and when
a server that failed is tried again).
"""
