"""Tests of the pure cores: events in, commands out."""
