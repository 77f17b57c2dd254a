"""What gateways and schedulers decide, without IO.

Contract of this folder: ``step(now_s, event) -> list[Command]`` with the time passed in; no event loop, clock,
randomness, socket or logging. ``next_wake_s`` says when a core wants a ``Ticked`` event. The simulator runs these same
classes on a virtual clock.

- ``requests/``: who runs what, and what is taken on (gateways).
- ``pool/``: what is reported, and the steps under way. ``plan/``: which deployment gets how many replicas, and where.
- ``scheduler`` is the core of the scheduler: it asks the plan and carries its decisions out by ``actions``; ``outcomes``
  says what losses and failed loads bring, ``digest`` what everybody is told.

Imports go one way: ``scheduler`` > ``plan`` > ``pool``; ``requests`` stands alone.
"""
