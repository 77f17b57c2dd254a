"""A checked ``ModelService`` plus the files on disk become a ``ModelRecord``."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from profiles.service import ModelService
from subjects.messages import ModelRecord

Progress = Callable[[str], None]


def build_record(service: ModelService, base_dir: Path, *, progress: Progress | None = None) -> ModelRecord:
    """The record of ``service``; relative sources are below ``base_dir`` (the folder of the YAML file).

    Raises:
        ConfigError: one line with the field and the remedy.
    """
    raise NotImplementedError
