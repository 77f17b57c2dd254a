"""Why an adapter cannot answer: what is wrong on this worker only, and what is wrong on every one (ING-3, REL-1)."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from msgspec.structs import replace

from subjects.ids import RequestId
from subjects.messages import Adapter, Failure, FailureKind
from tests.core.scheduler_world import record
from workers.core.held_request import Key
from workers.engines import adapter_gate
from workers.engines.adapter_gate import AdapterGate, AdapterRefused

RECORD = replace(record("base"), adapters_max=1, adapters_rank_max=8)
KEY: Key = (RequestId("r"), 1)


class Engine:
    """Takes every adapter but those called ``bad``."""

    def __init__(self) -> None:
        self.loaded: list[str] = []

    async def load(self, adapter: Adapter, slot_id: int) -> None:
        """What the gate calls."""
        if adapter.name == "bad":
            raise ValueError("/a/path is of no use")
        self.loaded.append(adapter.name)

    async def evict(self, slot_id: int) -> None:
        """What the gate calls."""


@pytest_asyncio.fixture
async def gate() -> AsyncIterator[AdapterGate]:
    """A gate with one slot."""
    engine = Engine()
    gate = AdapterGate(RECORD, load=engine.load, evict=engine.evict)
    yield gate
    await gate.close()


async def refused(gate: AdapterGate, adapter: Adapter) -> Failure:
    """Why it does not come in."""
    with pytest.raises(AdapterRefused) as caught:
        await gate.enter(KEY, adapter)
    failure = caught.value.failure
    assert (failure.param, failure.code) == ("model", "adapter_unavailable")
    assert "/" not in failure.message
    return failure


async def test_what_is_wrong_on_this_worker_is_tried_elsewhere(
    gate: AdapterGate, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files that are missing or other ones here, and an engine that does not load them: no 400 for the client."""
    missing = Adapter(name="gone", source=str(tmp_path / "gone"), adapter_hash="0", rank=4)
    (tmp_path / "adapter_config.json").write_text("{}")
    (tmp_path / "adapter_model.safetensors").write_bytes(b"x")
    changed = Adapter(name="changed", source=str(tmp_path), adapter_hash="0", rank=4)
    bad = Adapter(name="bad", source=str(tmp_path), adapter_hash="0", rank=4)
    failures = [await refused(gate, missing), await refused(gate, changed)]
    monkeypatch.setattr(adapter_gate, "verify_adapter", lambda adapter: None)
    failures.append(await refused(gate, bad))
    assert [(failure.kind, failure.status) for failure in failures] == [(FailureKind.SICK, 500)] * 3
    assert [failure.message for failure in failures] == [
        "the files of adapter 'gone' are missing on this worker",
        "the files of adapter 'changed' changed since it was applied; it has to be applied again",
        "the engine does not load the adapter 'bad'; the worker's log says why",
    ]
    assert await gate.enter(KEY, replace(bad, name="good")) > 0


async def test_what_is_wrong_everywhere_is_the_clients(gate: AdapterGate, tmp_path: Path) -> None:
    """A rank that no replica takes, and a model without adapters: a 400 at once."""
    wide = Adapter(name="wide", source=str(tmp_path), adapter_hash="0", rank=16)
    none = AdapterGate(replace(RECORD, adapters_max=0), load=Engine().load, evict=Engine().evict)
    failures = [await refused(gate, wide), await refused(none, replace(wide, rank=4))]
    assert [(failure.kind, failure.status) for failure in failures] == [(FailureKind.BAD_REQUEST, 400)] * 2
    assert [failure.message for failure in failures] == [
        "the adapter 'wide' has rank 16, and this replica takes 8 at most",
        "this replica was started without adapters",
    ]
