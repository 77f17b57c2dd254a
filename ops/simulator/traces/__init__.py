"""Readers of public traces and samplers of requests. Contract: columns out (``types.Trace``), no policy, no prompts.

What is drawn depends on the seed, the model, the client and the ten-minute cell of the trace alone, never on which window is
simulated: the same request appears in every window that contains its arrival. Draws use uniform random bits, stored tables
and the four operations only, so that a seed gives the same requests on any machine.

- ``columns``: building, merging and cutting traces. ``draws``: random streams by name, inter-arrival times, lengths.
- ``servegen``, ``azure``, ``mooncake``, ``aegaeon``: one public data set each, from the package's data or a user's own file.
- ``limits``: what a user's file may hold at most.
- ``recording``: our own format, profiles without prompts. ``importing``: one entry for a user's file in any format.
- ``pack``: makes the files in ``ops/simulator/data`` from the public ones.
"""
