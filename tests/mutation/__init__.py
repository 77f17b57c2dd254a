"""Mutation testing of the pure cores: ``python -m tests.mutation --seed 1 --count 240``."""
