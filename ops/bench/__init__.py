"""Benchmarks: figures as ratios of things measured in the same run on the same machine (``carpool bench``)."""
