"""The SQLite registry: what is put is there after any death (PRO-2)."""

from __future__ import annotations

import signal
import sqlite3
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from profiles.deployment import with_deployment
from profiles.registry import SCHEMA_VERSION, Registry
from subjects.errors import ConfigError
from subjects.ids import ModelHash
from subjects.messages import EngineType, ModelRecord, Sla

WRITER = """
import sys
from pathlib import Path
from profiles.registry import Registry
from tests.core.test_profiles_registry import record
registry = Registry(Path(sys.argv[1]))
for revision in range(1, 1_000_000):
    registry.put(record("a", revision=revision))
    print(revision, flush=True)
"""


def record(name: str, *, revision: int = 1, model_hash: str = "ab" * 32) -> ModelRecord:
    """A record with every kind of column set."""
    made = ModelRecord(
        name=name,
        revision=revision,
        model_hash=ModelHash(model_hash),
        weights_hash="cd" * 32,
        kv_signature="sig",
        engine_type=EngineType.VLLM,
        source="/m",
        sla=Sla(ttft_p95_ms=1500),
        weights_bytes=2 * 10**9,
        kv_bytes_per_token=1024,
        kv_bytes=10**9,
        budget_bytes=3 * 10**9,
        max_context_len=2048,
        tokenizer_hash="ef" * 32,
    )
    return with_deployment(made)


def test_put_get_list_delete(tmp_path: Path) -> None:
    """The four things a registry does, over a restart."""
    path = tmp_path / "state" / "models.sqlite"
    registry = Registry(path)
    registry.put(record("b"))
    registry.put(record("a", model_hash="12" * 32))
    registry.put(record("b", revision=2))
    registry.close()
    registry.close()
    registry = Registry(path)
    assert registry.list() == [record("a", model_hash="12" * 32), record("b", revision=2)]
    assert registry.get("b") == record("b", revision=2)
    assert registry.get("c") is None
    assert registry.delete("b")
    assert not registry.delete("b")
    assert [one.name for one in registry.list()] == ["a"]
    registry.close()


def test_columns_are_those_of_pro_2(tmp_path: Path) -> None:
    """A person with the sqlite3 program sees the model's numbers without decoding anything."""
    registry = Registry(tmp_path / "m.sqlite")
    registry.put(record("a"))
    registry.close()
    database = sqlite3.connect(tmp_path / "m.sqlite")
    row = database.execute(
        "SELECT model_hash, engine_type, min_gpu_mem_gb, max_context_len, warmup_tokens, tokenizer, kv_signature, "
        "sla_ttft_p95_ms, sla_p95_latency_ms FROM models"
    ).fetchone()
    strict = database.execute("SELECT sql FROM sqlite_master WHERE name = 'models'").fetchone()[0]
    mode = database.execute("PRAGMA journal_mode").fetchone()[0]
    database.close()
    assert row == ("ab" * 32, "vllm", 3.0, 2048, 4, "ef" * 32, "sig", 1500, None)
    assert strict.endswith("STRICT")
    assert mode == "wal"


def test_survives_kill_9_while_writing(tmp_path: Path) -> None:
    """Every put that returned is there after a kill, and the file is sound."""
    path = tmp_path / "m.sqlite"
    command = [sys.executable, "-c", WRITER, str(path)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2])
    assert process.stdout is not None
    confirmed = 0
    for line in process.stdout:
        confirmed = int(line)
        if confirmed >= 50:
            break
    process.send_signal(signal.SIGKILL)
    rest = process.stdout.read().split()
    process.stdout.close()
    process.wait(timeout=30)
    confirmed = max(confirmed, *(int(number) for number in rest)) if rest else confirmed
    registry = Registry(path)
    found = registry.get("a")
    registry.close()
    assert found is not None
    assert found.revision in (confirmed, confirmed + 1)
    database = sqlite3.connect(path)
    assert database.execute("PRAGMA integrity_check").fetchone() == ("ok",)
    database.close()


def test_threads_may_share_it(tmp_path: Path) -> None:
    """The scheduler calls it from worker threads."""
    registry = Registry(tmp_path / "m.sqlite")
    threads = [threading.Thread(target=registry.put, args=(record(f"m{index}"),)) for index in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [one.name for one in registry.list()] == [f"m{index}" for index in range(8)]
    registry.close()


def test_a_record_that_cannot_be_read_hides_no_other(tmp_path: Path) -> None:
    """One row of rubbish costs that row."""
    registry = Registry(tmp_path / "m.sqlite")
    registry.put(record("a"))
    registry.put(record("b"))
    registry.close()
    database = sqlite3.connect(tmp_path / "m.sqlite")
    database.execute("UPDATE models SET record = x'c1' WHERE name = 'a'")
    database.commit()
    database.close()
    registry = Registry(tmp_path / "m.sqlite")
    assert registry.list() == [record("b")]
    assert registry.get("a") is None
    registry.close()


def test_files_that_are_no_registry(tmp_path: Path) -> None:
    """Rubbish, a newer schema and a folder that cannot be made are one line each."""
    (tmp_path / "rubbish").write_bytes(b"x" * 9000)
    with pytest.raises(ConfigError, match="is not a registry"):
        Registry(tmp_path / "rubbish")
    database = sqlite3.connect(tmp_path / "newer")
    database.execute(f"PRAGMA user_version = {SCHEMA_VERSION + 1}")
    database.close()
    with pytest.raises(ConfigError, match="newer Carpool"):
        Registry(tmp_path / "newer")
    with pytest.raises(ConfigError, match="cannot be opened"):
        Registry(tmp_path / "rubbish" / "m.sqlite")


def test_damage_deep_in_the_file_is_told_when_it_is_opened(tmp_path: Path) -> None:
    """Not by the first read of a page that is gone."""
    path = tmp_path / "m.sqlite"
    registry = Registry(path)
    registry.put(record("a"))
    registry.close()
    damaged = bytearray(path.read_bytes())
    damaged[4096:] = b"\x17" * (len(damaged) - 4096)
    path.write_bytes(damaged)
    with pytest.raises(ConfigError, match="is not a registry"):
        Registry(path)


def test_a_file_that_can_no_longer_be_used_is_one_kind_of_error(tmp_path: Path) -> None:
    """A disk that fills up, say: in one line, whatever was asked."""
    registry = Registry(tmp_path / "m.sqlite")
    registry.put(record("a"))
    registry._database.execute("PRAGMA query_only = ON")
    with pytest.raises(ConfigError, match="cannot be used"):
        registry.put(record("b"))
    with pytest.raises(ConfigError, match="cannot be used"):
        registry.delete("a")
    assert registry.list() == [record("a")]
    registry.close()
