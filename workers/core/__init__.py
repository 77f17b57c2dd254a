"""What agents and replicas decide, without IO.

Contract of this folder: ``step(now_s, event) -> list[Command]`` with the time passed in; no event loop, clock, randomness,
process, socket or logging. Ids that need randomness come in with the event that needs them. ``next_wake_s`` says when a
core wants a ``Ticked`` event. The simulator runs these same classes on a virtual clock.
"""
