"""Commands about models: apply, get, fetch, make-tiny."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from ops.control import control
from subjects.errors import ConfigError
from subjects.messages import ModelRecord


def records_of(files: Sequence[Path]) -> list[ModelRecord]:
    """The records of all services in ``files``, hashes computed.

    Raises:
        ConfigError: a file is wrong, or two services share a name.
    """
    from profiles.record import build_record
    from profiles.service import load_services

    records: list[ModelRecord] = []
    for path in files:
        for service in load_services(path):
            try:
                record = build_record(service, path.parent)
            except ConfigError as error:
                raise ConfigError(f"{path}: {error}") from None
            if any(other.name == record.name for other in records):
                raise ConfigError(f"{path}: metadata.name: {record.name!r} is declared twice; give one another name")
            records.append(record)
    return records


async def apply_files(files: Sequence[Path], *, nats_url: str) -> None:
    """Applies ``files`` and prints a line per model; without ``nats_url`` only says what would be applied."""
    records = records_of(files)
    notes: dict[str, str] = {}
    if nats_url:
        rows = await control(nats_url, "apply", {"records": [msgspec.to_builtins(record) for record in records]}) or []
        notes = {row["name"]: row.get("note", "") for row in rows}
    for record in records:
        note = notes.get(record.name, "")
        print(
            f"{record.name}: {'applied' if nats_url else 'would be applied'}, {record.model_hash[:16]}, "
            f"needs {size(record.budget_bytes)} (weights {size(record.weights_bytes)}, KV {size(record.kv_bytes)}, "
            f"overhead {size(record.overhead_bytes)}), {record.kv_bytes_per_token} B of KV per token, "
            f"context {record.max_context_len}"
            + (", random weights" if record.random_weights else "")
            + (f"; {note}" if note else "")
        )


async def show(what: str, *, as_json: bool, nats_url: str) -> None:
    """Prints the rows of ``carpool get``."""
    rows: list[dict[str, Any]] = await control(nats_url, "get", {"what": what}) or []
    if as_json:
        print(msgspec.json.encode({what: rows}).decode())
        return
    if not rows:
        print(f"no {what}")
        return
    print_table(rows)


def print_table(rows: Sequence[dict[str, Any]], *, title: str | None = None) -> None:
    """Rows of equal keys as a table, bytes in binary units."""
    import os

    from rich.console import Console
    from rich.table import Table

    table = Table(title=title, box=None, header_style="bold", title_justify="left", pad_edge=False)
    columns = list(rows[0])
    for column in columns:
        numeric = all(isinstance(row.get(column), int | float) for row in rows)
        table.add_column(column.removesuffix("_bytes"), justify="right" if numeric else "left", overflow="fold")
    for row in rows:
        table.add_row(*(_cell(column, row.get(column)) for column in columns))
    # A pipe gets whole lines; a terminal gets its own width.
    width = None if os.isatty(1) else 200
    Console(width=width, highlight=False, markup=False).print(table)


def _cell(column: str, value: Any) -> str:
    if value is None:
        return "-"
    if column.endswith("_bytes"):
        return size(int(value))
    if isinstance(value, float):
        return f"{value:.2f}" if abs(value) < 100 else f"{value:.0f}"
    if isinstance(value, list):
        return ",".join(str(item) for item in value)
    return str(value)


def size(count: int) -> str:
    """``count`` bytes in binary units, three digits."""
    value = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.0f} B" if unit == "B" else f"{value:.3g} {unit}" if value < 100 else f"{value:.0f} {unit}"
        value /= 1024
    return f"{value:.3g} TiB"


def fetch_model(model: str) -> Path:
    """Fetches and converts a known model once; returns its directory."""
    from profiles.smollm2 import ensure_smollm2

    assert model == "smollm2"
    return ensure_smollm2(lambda line: print(line, flush=True))


def make_tiny_model(name: str, *, seed: int, directory: Path | None) -> Path:
    """Makes a tiny random model in ``directory`` or the cache; returns its directory."""
    from profiles.paths import models_dir
    from profiles.tiny import make_tiny

    return make_tiny(name, directory or models_dir() / f"{name}-{seed}", seed=seed)
