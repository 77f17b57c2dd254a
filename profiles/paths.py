"""Where Carpool keeps what it can make again: converted models and file digests."""

from __future__ import annotations

import os
from pathlib import Path


def cache_dir() -> Path:
    """``$CARPOOL_CACHE``, else ``$XDG_CACHE_HOME/carpool``, else ``~/.cache/carpool``. It may not exist yet."""
    if own := os.environ.get("CARPOOL_CACHE"):
        return Path(own).expanduser().absolute()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base and Path(base).is_absolute() else Path("~/.cache").expanduser()) / "carpool"


def models_dir() -> Path:
    """The folder of models that Carpool itself made or converted."""
    return cache_dir() / "models"
