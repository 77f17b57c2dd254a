"""Suite 1: the tests of ``openai-python``, unedited from its source archive."""

from __future__ import annotations

from tests.extra.outcome import Outcome, Surroundings
from tests.extra.pytest_suite import pytest_outcome
from tests.extra.tools import pinned, python_of, source_of

SUITE = "openai-python"
TIMEOUT_S = 300.0


async def run(surroundings: Surroundings) -> Outcome:
    """Runs what speaks to a server; ``TEST_API_BASE_URL`` is the suite's own way to be told which."""
    version = pinned("openai-python.lock")["openai"]
    return await pytest_outcome(
        SUITE,
        version=version,
        python=await python_of("openai-python"),
        # Its own options ask for pytest-xdist, and all its files for more packages than these tests need.
        words=["-o", "addopts=", "tests"],
        cwd=await source_of("openai", version),
        directory=surroundings.directory,
        environment={"TEST_API_BASE_URL": surroundings.base_url},
        timeout_s=TIMEOUT_S,
    )
