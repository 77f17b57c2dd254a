"""Models and servers that the whole-part tests share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from profiles.tiny import make_tiny
from tests.e2e.engines import VllmServer


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a tiny random model."""
    return make_tiny("tiny", tmp_path_factory.mktemp("models") / "tiny", seed=1)


@pytest.fixture(scope="session")
def vllm_server(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmServer]:
    """A real vLLM server with the tiny model: an engine for ``openai_http`` and an oracle for our own vLLM engine."""
    server = VllmServer(tiny_model, tmp_path_factory.mktemp("vllm-server") / "log")
    try:
        server.wait()
        yield server
    finally:
        server.stop()
