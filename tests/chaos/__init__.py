"""Kills, freezes and restarts of real processes."""
