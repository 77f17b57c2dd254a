"""Suites 2 to 4: ``langchain-tests``, by chats and by responses of a scripted model, and by a real SmolLM2 on vLLM."""

from __future__ import annotations

from pathlib import Path

from tests.extra.outcome import Outcome, Suite, Surroundings
from tests.extra.pytest_suite import pytest_outcome
from tests.extra.tools import pinned, python_of

CLIENTS = Path(__file__).parent / "clients"
TIMEOUT_S = 420.0
REAL = "langchain-smollm2"
SUITES = {
    "langchain": ("TestUnit", "TestScripted", "TestEmbeddings"),
    "langchain-responses": ("TestScriptedResponses",),
    REAL: ("TestReal",),
}


def suite(name: str) -> Suite:
    """The suite of that name."""

    async def run(surroundings: Surroundings) -> Outcome:
        return await pytest_outcome(
            name,
            version=pinned("langchain.lock")["langchain-tests"],
            python=await python_of("langchain"),
            words=["--benchmark-disable", *(f"langchain_chat.py::{one}" for one in SUITES[name])],
            cwd=CLIENTS,
            directory=surroundings.directory,
            environment={"EXTRA_BASE_URL": surroundings.base_url, "LANGSMITH_TRACING": "false"},
            timeout_s=TIMEOUT_S,
        )

    return run
