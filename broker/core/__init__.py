"""What gateways and schedulers decide, without IO.

Contract of this folder: ``step(now_s, event) -> list[Command]`` with the time passed in; no event loop, clock, randomness,
socket or logging. ``next_wake_s`` says when a core wants a ``Ticked`` event. The simulator runs these same classes on a
virtual clock.

- Requests: ``requests`` (who runs what), ``hands`` (who is handed one at once) with ``affinity`` (where its prefix is, and
  what that saves), ``admission`` (what is taken on, and how it is refused).
- Placement: ``placement`` is the scheduler core and the base rules on one page. It asks a ``policy`` over a ``view`` of the
  pool and carries its decisions out by ``actions``. ``planning`` says which models want room, ``siting`` where they could
  have it, ``usage`` who uses what, ``outcomes`` what losses and failed loads bring.
- The ``coordinator``, the policy that is ours: what each model needs (``needs``, ``headroom``) and will need (``prospects``
  with ``forecast``, ``triggers`` and ``learning``) makes a ``problem``, whose best ``layout`` ``packing`` looks for;
  ``memory`` and ``spares`` share out what is left. ``exact`` proves on small pools how good that is (``ops.bench.packing``).
- The pool: ``pool`` is what is reported (``members``, ``inflow``) with the arithmetic of room (``rooms``), ``catalogue`` the
  models and their failures, ``transactions`` the steps under way, ``orders`` their commands, ``journal`` what a successor
  finds of them, ``kv_tiers`` what KV nodes tell, ``digest`` what everybody is told, ``scheduler_events`` the events,
  commands and numbers.
"""
