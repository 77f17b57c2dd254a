"""The registry in SQLite (PRO-2): the scheduler's own copy of the ``carpool-models`` bucket, of people's locks, and
of measured costs.

The columns are for people and reports; the truth is the MessagePack record beside them. Every ``put`` and ``delete`` is on
disk when it returns, so a kill at any moment leaves either the state before or the state after.
"""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from profiles.deployment import decode_record
from subjects.codec import decode, encode
from subjects.errors import ConfigError, DecodeError
from subjects.messages import KeptCosts, ModelRecord, Overrides

SCHEMA_VERSION = 1
_BUSY_TIMEOUT_S = 5.0

_SCHEMA = """
CREATE TABLE IF NOT EXISTS models (
    name             TEXT PRIMARY KEY,
    revision         INTEGER NOT NULL,
    model_hash       TEXT NOT NULL,
    weights_hash     TEXT NOT NULL,
    engine_type      TEXT NOT NULL,
    min_gpu_mem_gb   REAL NOT NULL,
    max_context_len  INTEGER NOT NULL,
    warmup_tokens    INTEGER NOT NULL,
    tokenizer        TEXT NOT NULL,
    kv_signature     TEXT NOT NULL,
    sla_ttft_p95_ms  INTEGER NOT NULL,
    sla_p95_latency_ms INTEGER,
    record           BLOB NOT NULL
) STRICT;
CREATE INDEX IF NOT EXISTS models_by_hash ON models (model_hash);
CREATE TABLE IF NOT EXISTS overrides (
    one       INTEGER PRIMARY KEY CHECK (one = 1),
    revision  INTEGER NOT NULL,
    entries   BLOB NOT NULL
) STRICT;
CREATE TABLE IF NOT EXISTS costs (
    key   TEXT PRIMARY KEY,
    kept  BLOB NOT NULL
) STRICT;
"""


class Registry:
    """Model records by name, in one SQLite file. Blocking: call it off the hot path. Safe from several threads."""

    def __init__(self, path: Path) -> None:
        """Opens the file, or makes it.

        Raises:
            ConfigError: the file cannot be used, in one line.
        """
        self._path = path
        self._lock = threading.Lock()
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._database = sqlite3.connect(path, timeout=_BUSY_TIMEOUT_S, check_same_thread=False, isolation_level=None)
        except (OSError, sqlite3.Error) as error:
            raise ConfigError(f"{path}: the registry cannot be opened ({error}); check the folder's permissions") from None
        try:
            self._database.execute("PRAGMA journal_mode = WAL")
            self._database.execute("PRAGMA synchronous = FULL")
            version = self._database.execute("PRAGMA user_version").fetchone()[0]
            if version > SCHEMA_VERSION:
                raise ConfigError(f"{path}: written by a newer Carpool (schema {version}); upgrade, or name another folder")
            found = self._database.execute("PRAGMA quick_check(1)").fetchone()[0]
            if found != "ok":
                raise sqlite3.DatabaseError(str(found).splitlines()[-1])
            self._database.executescript(_SCHEMA)
            self._database.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
        except sqlite3.Error as error:
            self._database.close()
            raise self._broken(error) from None
        except ConfigError:
            self._database.close()
            raise

    def _broken(self, error: sqlite3.Error) -> ConfigError:
        if isinstance(error, sqlite3.OperationalError):
            return ConfigError(f"{self._path}: cannot be used ({error}); check the disk and the file's permissions")
        return ConfigError(f"{self._path}: is not a registry ({error}); move the file away, it is filled again")

    def put(self, record: ModelRecord) -> None:
        """Stores ``record`` under its name, in place of an earlier one; it is on disk when this returns.

        Raises:
            ConfigError: the file cannot be written (so too in the other methods), in one line.
        """
        row = (
            record.name,
            record.revision,
            record.model_hash,
            record.weights_hash,
            record.engine_type.value,
            record.budget_bytes / 10**9,
            record.max_context_len,
            record.warmup_tokens,
            record.tokenizer_hash,
            record.kv_signature,
            record.sla.ttft_p95_ms,
            record.sla.p95_latency_ms,
            encode(record),
        )
        places = ", ".join("?" * len(row))
        self._execute(f"INSERT OR REPLACE INTO models VALUES ({places})", row)  # noqa: S608 - question marks

    def get(self, name: str) -> ModelRecord | None:
        """The record of that name."""
        return next(iter(self._records("WHERE name = ?", name)), None)

    def delete(self, name: str) -> bool:
        """Whether there was such a record."""
        return self._execute("DELETE FROM models WHERE name = ? RETURNING name", (name,)) != []

    def _execute(self, statement: str, values: Sequence[Any]) -> list[tuple[Any, ...]]:
        try:
            with self._lock:
                return self._database.execute(statement, values).fetchall()
        except sqlite3.Error as error:
            raise self._broken(error) from None

    def list(self) -> list[ModelRecord]:
        """All records by name. One that a newer version wrote and this one cannot read is left out."""
        return list(self._records(""))

    def put_overrides(self, overrides: Overrides) -> None:
        """Keeps people's locks, drains, pins and modes, in place of earlier ones."""
        row = (overrides.revision, encode(overrides))
        self._execute("INSERT OR REPLACE INTO overrides VALUES (1, ?, ?)", row)

    def overrides(self) -> Overrides:
        """The last ones kept; none in revision 0 when there are none, or when this version cannot read them."""
        for (data,) in self._execute("SELECT entries FROM overrides", ()):
            with suppress(DecodeError):
                return decode(data, Overrides)
        return Overrides()

    def put_costs(self, key: str, kept: KeptCosts) -> None:
        """Keeps a measurement in place of an earlier one of this key."""
        self._execute("INSERT OR REPLACE INTO costs VALUES (?, ?)", (key, encode(kept)))

    def delete_costs(self, key: str) -> None:
        """Forgets them."""
        self._execute("DELETE FROM costs WHERE key = ?", (key,))

    def costs(self) -> Sequence[KeptCosts]:
        """All measurements that this version can read, in order of their keys."""
        kept = []
        for (data,) in self._execute("SELECT kept FROM costs ORDER BY key", ()):
            with suppress(DecodeError):
                kept.append(decode(data, KeptCosts))
        return kept

    def close(self) -> None:
        """Closes the file; calling again does nothing."""
        with self._lock:
            self._database.close()

    def _records(self, where: str, *values: str) -> Sequence[ModelRecord]:
        records = []
        for (data,) in self._execute(f"SELECT record FROM models {where} ORDER BY name", values):  # noqa: S608 - our own text
            with suppress(DecodeError):
                records.append(decode_record(data))
        return records
