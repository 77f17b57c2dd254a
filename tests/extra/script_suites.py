"""Suites that are one script each, which prints ``{"passed": [...], "failures": [...]}`` on its last line."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from subjects.errors import CarpoolError
from tests.extra.outcome import Outcome, Surroundings
from tests.extra.pool import environment_of_tools
from tests.extra.tools import npm_folder, pinned, python_of, run

CLIENTS = Path(__file__).parent / "clients"
NPM = "openai-npm"
LITELLM = "litellm"
TIMEOUT_S = 180.0
_TAIL_CHARS = 1500


class _Said(msgspec.Struct, frozen=True):
    passed: tuple[str, ...]
    failures: tuple[str, ...]


async def run_npm(surroundings: Surroundings) -> Outcome:
    """The ``openai`` npm package."""
    folder = await npm_folder(NPM)
    argv = [shutil.which("node") or "node", str(CLIENTS / "openai_npm.mjs")]
    return await _script(NPM, pinned(f"{NPM}.lock")["openai"], argv, surroundings, {"EXTRA_NODE_FOLDER": str(folder)})


async def run_litellm(surroundings: Surroundings) -> Outcome:
    """LiteLLM as a client."""
    python = await python_of(LITELLM)
    argv = [str(python), str(CLIENTS / "litellm_client.py")]
    # It would fetch a table of prices at import otherwise.
    variables = {"LITELLM_LOCAL_MODEL_COST_MAP": "True"}
    return await _script(LITELLM, pinned(f"{LITELLM}.lock")["litellm"], argv, surroundings, variables)


async def _script(
    suite: str, version: str, argv: Sequence[str], surroundings: Surroundings, variables: Mapping[str, str]
) -> Outcome:
    environment = environment_of_tools() | dict(variables)
    environment |= {"EXTRA_BASE_URL": surroundings.base_url, "EXTRA_SCRIPTED_URL": surroundings.scripted_url}
    code, output = await run(argv, cwd=surroundings.directory, environment=environment, timeout_s=TIMEOUT_S)
    (surroundings.directory / f"{suite}.log").write_text(output)
    try:
        said = msgspec.json.decode(output.rstrip().rpartition("\n")[2], type=_Said)
    except msgspec.MsgspecError:
        raise CarpoolError(f"{suite}: ended with code {code}: {output[-_TAIL_CHARS:]}") from None
    return Outcome(suite=suite, version=version, passed=len(said.passed), failed=len(said.failures), failures=said.failures)
