"""The pool that the suites speak to: ours, started by our own code, with a scripted server beside it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import sys
import time
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path

import httpx
import msgspec

from ops.bench.peers import program
from ops.control import control
from ops.models import make_tiny_model, records_of
from ops.servers import free_port
from ops.supervisor import Pool, PoolOptions
from subjects.errors import CarpoolError
from tests.extra.outcome import Surroundings

HERE = Path(__file__).parent
REAL_MODEL = HERE / "models_real.yaml"
DEVICE = "cpu:6GiB"
SCRIPTED_S_MAX = 30.0
WAKE_S_MAX = 180.0
_POLL_S = 0.1


@contextlib.asynccontextmanager
async def pool_with_models(directory: Path, say: Callable[[str], None], *, real: bool) -> AsyncIterator[Surroundings]:
    """A pool with the models of ``models.yaml`` and, when ``real``, SmolLM2 on vLLM; its state and logs in ``directory``.

    Raises:
        CarpoolError: a part does not start; the message says which and has the tail of its log.
    """
    port = free_port()
    argv = [sys.executable, "-m", "tests.extra.scripted", str(port)]
    log = directory / "scripted.log"
    async with program(argv, log, {"PYTHONPATH": str(HERE.parent.parent)}) as scripted:
        await _until_listening(port, lambda: scripted.returncode is not None, log)
        tokenizer = await asyncio.to_thread(make_tiny_model, "extra", seed=1, directory=directory / "tiny")
        services = directory / "models.yaml"
        text = (HERE / "models.yaml").read_text().replace("{scripted}", f"http://127.0.0.1:{port}")
        services.write_text(text.replace("{tokenizer}", str(tokenizer)))
        # Converting SmolLM2 for the first time takes a while and must not hold the loop.
        records = await asyncio.to_thread(records_of, [services, *([REAL_MODEL] if real else [])])
        options = PoolOptions(state_dir=directory / "state", devices=(DEVICE,))
        async with Pool(options, say=say) as pool:
            await control(pool.nats_url, "apply", {"records": [msgspec.to_builtins(record) for record in records]})
            yield Surroundings(
                base_url=f"{pool.http_url}/v1",
                scripted_url=f"http://127.0.0.1:{port}",
                directory=directory,
                tokenizer=tokenizer,
            )


async def wake(base_url: str, bodies: Sequence[tuple[str, dict[str, object]]]) -> None:
    """Asks once for each model, so that no suite's own timeout has to hold for a model's start.

    Raises:
        CarpoolError: one is not answered.
    """
    async with httpx.AsyncClient(timeout=WAKE_S_MAX, trust_env=False) as client:
        for route, body in bodies:
            reply = await client.post(f"{base_url}{route}", json=body)
            if reply.status_code != 200:
                raise CarpoolError(f"{body['model']} does not answer: {reply.status_code} {reply.text[:300]}")


async def _until_listening(port: int, ended: Callable[[], bool], log: Path) -> None:
    deadline_s = time.monotonic() + SCRIPTED_S_MAX
    while True:
        with socket.socket() as probe:
            probe.settimeout(0.5)
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        if ended() or time.monotonic() > deadline_s:
            raise CarpoolError(f"the scripted server did not start: {log.read_text(errors='replace')[-500:]}")
        await asyncio.sleep(_POLL_S)


def environment_of_tools() -> dict[str, str]:
    """Our environment without what would turn a client elsewhere."""
    dropped = ("OPENAI_", "TEST_API_", "ANTHROPIC_", "LANGCHAIN_", "LANGSMITH_", "LITELLM_", "PYTHON", "PYTEST_", "AIPERF_")
    proxies = ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY")
    return {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(dropped) and name.upper() not in proxies and name != "VIRTUAL_ENV"
    }
