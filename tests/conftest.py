"""Fixtures for all tests: real servers on loopback, and an invariant that runs after every test."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import structlog

from tests.servers import NatsServer, ValkeyServer


@pytest.fixture(autouse=True)
def no_child_is_left() -> Iterator[None]:
    """After a test no process runs that was not there before (REL-3: nothing may be orphaned).

    Fixtures of a wider scope start earlier and are not counted, nor is what their processes start.
    """
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    yield
    left = [child for child in psutil.Process().children(recursive=True) if not _belongs_to(child, before)]
    _gone, alive = psutil.wait_procs(left, timeout=5)
    for child in alive:
        child.kill()
    assert not alive, f"left running: {alive}"


@pytest.fixture(autouse=True)
def logs_are_as_they_were() -> Iterator[None]:
    """What a command that runs in this process says of its own logs holds for no other test."""
    before = structlog.get_config()
    yield
    structlog.configure(**before)


def _belongs_to(process: psutil.Process, pids: set[int]) -> bool:
    try:
        return process.pid in pids or any(parent.pid in pids for parent in process.parents())
    except psutil.NoSuchProcess:
        return True


@pytest.fixture
def nats_server(no_child_is_left: None, tmp_path: Path) -> Iterator[NatsServer]:
    """A fresh nats-server for one test."""
    server = NatsServer(tmp_path / "nats")
    yield server
    server.stop()


@pytest.fixture
def stopped_nats_server(no_child_is_left: None, tmp_path: Path) -> Iterator[NatsServer]:
    """A nats-server that the test starts itself."""
    server = NatsServer(tmp_path / "nats", start=False)
    yield server
    server.stop()


@pytest.fixture(scope="session")
def shared_nats_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NatsServer]:
    """One nats-server for all tests that neither stop it nor mind each other's streams."""
    server = NatsServer(tmp_path_factory.mktemp("shared-nats"))
    yield server
    server.stop()


@pytest.fixture
def valkey_server(no_child_is_left: None, tmp_path: Path) -> Iterator[ValkeyServer]:
    """A fresh Valkey for one test."""
    server = ValkeyServer(tmp_path / "valkey")
    yield server
    server.stop()
