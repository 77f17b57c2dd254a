"""What needs an NVIDIA GPU; run with ``pytest -m gpu``."""
