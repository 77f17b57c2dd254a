"""The registry of models in SQLite (PRO-2)."""

from __future__ import annotations

from pathlib import Path

from subjects.messages import ModelRecord


class Registry:
    """Model records by name, in one SQLite file. Blocking: call it off the hot path. Safe from several threads."""

    def __init__(self, path: Path) -> None:
        raise NotImplementedError

    def put(self, record: ModelRecord) -> None:
        """Stores ``record`` under its name; it is on disk when this returns."""

    def get(self, name: str) -> ModelRecord | None:
        """The record of that name."""
        raise NotImplementedError

    def delete(self, name: str) -> bool:
        """Whether there was such a record."""
        raise NotImplementedError

    def list(self) -> list[ModelRecord]:
        """All records by name."""
        raise NotImplementedError

    def close(self) -> None:
        """Closes the file; calling again does nothing."""
