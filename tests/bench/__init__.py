"""Yardsticks of the plan: small pools solved exactly, beside the greedy search."""
