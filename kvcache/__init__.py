"""KV cache tiers, their index and their hotness.

Empty for now, on purpose: engines keep KV pages in their own memory only. Block hashing for request profiles is in
``profiles.blocks``, since a profile carries the head of its chain whether or not any tier stores pages.
"""
