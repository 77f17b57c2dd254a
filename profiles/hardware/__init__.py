"""Kinds of device as published figures, and what a model costs on a kind it was not measured on.

``devices`` holds the kinds and the scaling rule; ``measured.csv`` the public fits that the rule is checked against
(``errors`` in ``devices``); ``SOURCES.md`` where all figures come from.
"""
