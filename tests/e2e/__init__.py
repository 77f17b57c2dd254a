"""Whole parts on real engines and real servers."""
