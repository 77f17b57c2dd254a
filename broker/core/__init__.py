"""What gateways and schedulers decide, without IO.

Contract of this folder: ``step(now_s, event) -> list[Command]`` with the time passed in; no event loop, clock, randomness,
socket or logging. ``next_wake_s`` says when a core wants a ``Ticked`` event. The simulator runs these same classes on a
virtual clock.

- Requests: ``requests`` (who runs what), ``admission`` (what is taken on, and how it is refused).
- Placement: ``placement`` is the policy and its rules on one page, ``planning`` answers its questions, ``pool`` is what is
  reported and the arithmetic of room, ``catalogue`` the models and their failures, ``transactions`` the steps under way,
  ``digest`` what everybody is told, ``scheduler_events`` the events, commands and numbers.
"""
