"""The pool: what is reported, and the steps under way.

Contract of this folder: pure; facts and transactions, no policy. ``state`` is what workers and gateways report
(``members`` its structs, ``memory`` the arithmetic of device memory, ``demand`` sums over gateways, ``kv_tiers`` what KV
nodes tell), ``catalogue`` the models with their failures, ``overrides`` operators' words, ``transactions``
(``transaction`` one of them) the scale actions under way with their ``commands``, ``journal`` what a successor finds of
them, ``events`` what the scheduler core hears and orders.
"""
