"""Seeded simulation: the production cores of a whole pool on a virtual clock, with faults."""
