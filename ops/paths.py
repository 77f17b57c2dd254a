"""Where state lives. Caches (converted models) are under ``profiles``' cache directory; this is about running pools."""

from __future__ import annotations

import os
from pathlib import Path

from subjects.errors import ConfigError
from subjects.ids import is_token


def state_root() -> Path:
    """``$CARPOOL_STATE``, else ``$XDG_STATE_HOME/carpool``, else ``~/.local/state/carpool``."""
    explicit = os.environ.get("CARPOOL_STATE")
    if explicit:
        return Path(explicit).expanduser()
    base = os.environ.get("XDG_STATE_HOME") or "~/.local/state"
    return Path(base).expanduser() / "carpool"


def pool_state(name: str) -> Path:
    """The directory of one named pool on this machine.

    Raises:
        ConfigError: ``name`` cannot be a directory and subject token.
    """
    if not is_token(name):
        raise ConfigError(f"--name {name!r}: use letters, digits, '-' and '_'")
    return state_root() / name
