"""Commands about models: apply, get, fetch, make-tiny."""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec

from ops.cli_common import clock
from ops.control import control
from profiles.deployment import sharers
from subjects.errors import ConfigError
from subjects.messages import ModelRecord

COLUMN_TITLE_MAX = 12
"""A longer title of a table's column takes two lines."""
GAP = 2
"""Spaces between columns."""
SENTENCE_CHARS_MIN = 40
"""A column of sentences is not narrower, where a table may be as wide as it needs."""


def records_of(files: Sequence[Path]) -> list[ModelRecord]:
    """The records of all services in ``files``, hashes computed; what has to be fetched first is told on stderr.

    It may take a while, so a command calls this before its event loop runs: there Ctrl-C would have to wait for it.

    Raises:
        ConfigError: a file is wrong, or two services share a name.
    """
    from profiles.record import build_record
    from profiles.service import load_services

    records: list[ModelRecord] = []
    for path in files:
        for service in load_services(path):
            try:
                record = build_record(service, path.parent, progress=_progress)
            except ConfigError as error:
                raise ConfigError(f"{path}: {error}") from None
            if any(other.name == record.name for other in records):
                raise ConfigError(f"{path}: metadata.name: {record.name!r} is declared twice; give one another name")
            records.append(record)
    return records


def _progress(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


async def apply_records(records: Sequence[ModelRecord], *, nats_url: str) -> None:
    """Applies ``records`` and tells what each needs; without ``nats_url`` only says what would be applied."""
    shared = ((record.name, sharers(record, records)) for record in records)
    notes = {name: f"shares replicas with {', '.join(others)}" for name, others in shared if others}
    if nats_url:
        rows = await control(nats_url, "apply", {"records": [msgspec.to_builtins(record) for record in records]}) or []
        notes = {row["name"]: row.get("note", "") for row in rows}
    for record in records:
        note = notes.get(record.name, "")
        print(
            f"{record.name}: {'applied' if nats_url else 'would be applied'}, needs {size(record.budget_bytes)} "
            f"(weights {size(record.weights_bytes)}, KV {size(record.kv_bytes)}, overhead {size(record.overhead_bytes)})\n"
            f"  context {record.max_context_len}, {record.kv_bytes_per_token} B of KV per token, "
            f"hash {record.model_hash[:16]}, deployment {record.deployment[:16]}"
            + (", random weights" if record.random_weights else "")
        )
        if record.adapters or record.adapters_max:
            print(f"  {adapters_text(record)}")
        if not nats_url:
            print(estimate_text(record))
        if note:
            print(f"  {note}")


def adapters_text(record: ModelRecord) -> str:
    """One line on a model's adapters: which, and how many of what rank a replica holds."""
    listed = ", ".join(adapter.name for adapter in record.adapters) or "none yet"
    room = f"; {record.adapters_max} at once, rank up to {record.adapters_rank_max}" if record.adapters_max else ""
    return f"adapters: {listed}{room}"


def estimate_text(record: ModelRecord) -> str:
    """What its steps should cost on each kind of device of this machine, marked as nobody's measurement."""
    import os

    import structlog

    from profiles.estimate import estimate, figures
    from subjects.messages import DeviceReport
    from workers.devices import parse_devices

    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))
    lines = []
    for device in {device.device_type: device for device in parse_devices(())}.values():
        threads = len(os.sched_getaffinity(0))
        report = DeviceReport(
            device=device.device,
            kind=device.kind,
            device_type=device.device_type,
            memory_bytes=device.memory_bytes,
            reserved_bytes=0,
            threads=threads,
        )
        given = record.costs.get(device.device_type)
        costs = given or estimate(record, figures(report))
        lines.append(
            f"  {'given' if given else 'estimated'} on {device.device_type}: a prompt of 1,000 tokens takes "
            f"{1e3 * costs.prefill_token_s + 1e6 * costs.prefill_token2_s:.3g} s, a token "
            f"{1e3 * (costs.step_const_s + costs.step_request_s):.3g} ms"
            + ("" if given else "; measured when it is first ready there")
        )
    return "\n".join(lines)


async def show(what: str, *, as_json: bool, nats_url: str) -> None:
    """Prints the rows of ``carpool get``."""
    rows: list[dict[str, Any]] = await control(nats_url, "get", {"what": what}) or []
    if as_json:
        print(msgspec.json.encode({what: rows}).decode())
        return
    if not rows:
        print("no KV tiers: no worker runs, or all were started with --no-kv" if what == "kv" else f"no {what}")
        return
    if what == "timeline":
        rows = [_told(row) for row in rows]
    if what == "kv":
        rows = [{**row, "models": [_kept(one) for one in row["models"]]} for row in rows]
    if what == "costs":
        rows = [_priced(row) for row in rows]
    if what == "locks":
        rows = [{**row, "since": clock(row["since_unix_s"], "%Y-%m-%d %H:%M"), "since_unix_s": None} for row in rows]
    print_table(rows)


def _told(entry: dict[str, Any]) -> dict[str, Any]:
    """An entry of the timeline as people read it, the long text last; ``--json`` has all of it."""
    return {
        "time": clock(entry["at_unix_s"]),
        "action": entry["action"],
        "model": entry["model"],
        "device": entry["device"],
        "took s": round(float(entry["took_s"]), 1) if entry["outcome"] else None,
        "outcome": entry["outcome"],
        "reason": entry["reason"],
    }


def _priced(row: dict[str, Any]) -> dict[str, Any]:
    """Costs as people read them: seconds of one request's parts in milliseconds; ``--json`` has all."""
    costs, corrected = row["costs"], f"times {row['correction']:.2f}" if row["correction"] != 1.0 else ""
    error = f"{row['error']:.0%} of {row['steps']} steps" if row["error"] is not None else None
    note = "takes another time for good, is measured again" if row["deviates"] else ""
    return {
        "model": row["model"],
        "kind": row["kind"],
        "source": f"{row['source']} {corrected}".strip(),
        "age_s": row["age_s"],
        "points": row["points"],
        "error": error,
        "1k prompt ms": round(1e3 * (1e3 * costs["prefill_token_s"] + 1e6 * costs["prefill_token2_s"]), 2),
        "step ms": round(1e3 * (costs["step_const_s"] + costs["step_request_s"]), 2),
        "note": note,
    }


def _kept(held: dict[str, Any]) -> str:
    """What a tier has of one model."""
    return f"{held['model']} {held['blocks']} ({size(held['bytes'])})"


def print_table(rows: Sequence[dict[str, Any]], *, title: str | None = None) -> None:
    """Rows of equal keys as a table, bytes in binary units."""
    import os

    from rich.console import Console
    from rich.table import Table

    table = Table(title=title, box=None, header_style="bold", title_justify="left", pad_edge=False)
    columns = [column for column in rows[0] if any(row.get(column) not in ("", [], None) for row in rows)]
    needed = GAP * (len(columns) - 1)
    for column in columns:
        numeric = all(isinstance(row.get(column), int | float | None) for row in rows)
        title_text = column.removesuffix("_bytes").replace("_", " ")
        if len(title_text) > COLUMN_TITLE_MAX:
            title_text = "\n".join(title_text.rsplit(" ", 1))
        # Sentences wrap; names and numbers only where a terminal is too narrow even then.
        wraps = column in ("note", "reason")
        lines = [title_text, *(_cell(column, row.get(column)) for row in rows)]
        longest = max(len(line) for text in lines for line in text.split("\n"))
        needed += min(longest, SENTENCE_CHARS_MIN) if wraps else longest
        justify: Literal["left", "right"] = "right" if numeric else "left"
        table.add_column(title_text, justify=justify, overflow="fold", no_wrap=not wraps)
    for row in rows:
        table.add_row(*(_cell(column, row.get(column)) for column in columns))
    # A pipe gets names and numbers whole; a terminal gets its own width.
    console = Console(width=None if os.isatty(1) else max(200, needed), highlight=False, markup=False)
    table.collapse_padding = needed > console.width
    if needed - (len(columns) - 1) > console.width:
        for part in table.columns:
            part.no_wrap = False
    console.print(table)


def _cell(column: str, value: Any) -> str:
    if value is None:
        return "-"
    if column.endswith("_bytes"):
        return size(int(value))
    if isinstance(value, float):
        return f"{value:.2f}" if column == "twu" else f"{value:.1f}" if abs(value) < 100 else f"{value:.0f}"
    if isinstance(value, list):
        return ", ".join(str(item) for item in value)
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
    return ensure_smollm2(_progress)


def make_tiny_model(name: str, *, seed: int, directory: Path | None) -> Path:
    """Makes a tiny random model in ``directory`` or the cache; returns its directory."""
    from profiles.paths import models_dir
    from profiles.tiny import make_tiny

    return make_tiny(name, directory or models_dir() / f"{name}-{seed}", seed=seed)
