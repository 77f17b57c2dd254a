"""Requests: who runs what, and what is taken on.

Contract of this folder: pure; imports nothing of ``broker`` outside itself. ``core`` is a gateway's state machine of its
requests (``live`` one of them, ``events`` what it hears and orders), ``links`` hands a request straight to a replica with
room, ``affinity`` weighs where its prefix is, ``admission`` takes requests on or refuses them, ``demand`` counts what a
gateway reports, ``agenda`` keeps wake-up times.
"""
