"""Routers that others wrote, found on PATH and started before the fake engine of a run.

None of them is a dependency. Each gets its own defaults but for address, ports and less logging, so what is measured is what
its users get. How to install one: ``pip install`` into an environment of its own, whose ``bin`` is then put on PATH.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import sys
import time
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from ops.bench.load import Task, measure
from ops.servers import free_port, port_is_free
from subjects.errors import CarpoolError

KEYS = tuple(f"sk-carpool-bench-tenant-{index}" for index in range(4))
"""API keys of the run's four tenants; whoever does not look at keys gets them all the same."""
START_S_MAX = 120.0
STOP_S_MAX = 10.0
PROMPT = "Tell me what a carpool is, and why people who drive to the same place would want to share one car."


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A system under load. ``pids``: the root process of each of its parts."""

    name: str
    port: int
    pids: Mapping[str, int] = field(default_factory=dict)
    keys: tuple[str, ...] = KEYS
    idle_model: str = "bench"
    """The model whose streams stay open when they are asked to."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """A router by its program's name; ``{port}``, ``{metrics}``, ``{engine}`` and ``{config}`` in the words are filled."""

    name: str
    install: str
    words: tuple[str, ...]
    config: str = ""
    environment: Mapping[str, str] = field(default_factory=dict)
    keys: tuple[str, ...] = KEYS


_ROUTER = ("--host", "127.0.0.1", "--port", "{port}", "--worker-urls", "http://127.0.0.1:{engine}")
_QUIET = ("--prometheus-port", "{metrics}", "--log-level")
PEERS = (
    Peer(name="vllm-router", install="pip install vllm-router", words=(*_ROUTER, *_QUIET, "warning")),
    Peer(name="smg", install="pip install smg", words=("launch", *_ROUTER, *_QUIET, "warn")),
    Peer(name="sglang-router", install="pip install sglang-router", words=("launch", *_ROUTER, *_QUIET, "warn")),
    Peer(
        name="litellm",
        install="pip install 'litellm[proxy]'",
        words=("--config", "{config}", "--host", "127.0.0.1", "--port", "{port}"),
        # It does not start without a master key, and knows others only with a database.
        config="model_list:\n- model_name: bench\n  litellm_params:\n    model: openai/bench\n"
        "    api_base: http://127.0.0.1:{engine}/v1\n    api_key: none\ngeneral_settings: {{master_key: {key}}}\n",
        environment={"LITELLM_LOCAL_MODEL_COST_MAP": "True", "LITELLM_LOG": "ERROR"},
        keys=KEYS[:1],
    ),
)


class PeerAbsent(CarpoolError):
    """Why a peer is not measured, in one line."""


def body(*, stream: bool, tokens: int, model: str = "bench", prompt: str = PROMPT) -> str:
    """A chat request as every system of a run gets it."""
    content = {"model": model, "messages": [{"role": "user", "content": prompt}], "max_tokens": tokens}
    return msgspec.json.encode(content | ({"stream": True} if stream else {})).decode()


@contextlib.asynccontextmanager
async def program(argv: list[str], log: Path, environment: Mapping[str, str]) -> AsyncIterator[asyncio.subprocess.Process]:
    """Runs a program that ends with the block, and with us if we are killed."""
    with log.open("wb") as out:
        process = await asyncio.create_subprocess_exec(
            *[sys.executable, "-m", "ops.tether", str(os.getpid()), "--", *argv],
            stdin=asyncio.subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            env=os.environ | environment,
        )
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        try:
            await asyncio.wait_for(process.wait(), STOP_S_MAX)
        except TimeoutError:
            process.kill()
            await process.wait()


@contextlib.asynccontextmanager
async def fake_engine(directory: Path) -> AsyncIterator[Target]:
    """The engine behind every peer, which is also what is asked directly."""
    port = free_port("127.0.0.1")
    argv = [sys.executable, "-m", "ops.bench.fake_engine", str(port)]
    async with program(argv, directory / "engine.log", {}) as process:
        deadline_s = time.monotonic() + START_S_MAX
        while port_is_free("127.0.0.1", port):
            if process.returncode is not None or time.monotonic() > deadline_s:
                raise CarpoolError(f"the fake engine did not start: {_last_line(directory / 'engine.log')}")
            await asyncio.sleep(0.05)
        yield Target(name="direct", port=port, pids={"engine": process.pid})


@contextlib.asynccontextmanager
async def started(peer: Peer, engine_port: int, directory: Path, say: Callable[[str], None]) -> AsyncIterator[Target]:
    """The peer, once it has answered a request.

    Raises:
        PeerAbsent: it is not on PATH, ended, or did not answer in time.
    """
    path = shutil.which(peer.name)
    if path is None:
        raise PeerAbsent(f"not on PATH; {peer.install} gives it")
    say(f"starting {peer.name}")
    port = free_port("127.0.0.1")
    config = directory / f"{peer.name}.yaml"
    config.write_text(peer.config.format(engine=engine_port, key=peer.keys[0]))
    fills = {"port": port, "metrics": free_port("127.0.0.1"), "engine": engine_port, "config": config}
    words = [word.format_map(fills) for word in peer.words]
    log = directory / f"{peer.name}.log"
    # A proxy of the network must not come between a router and an engine on loopback.
    environment = {"NO_PROXY": "127.0.0.1", "no_proxy": "127.0.0.1", **peer.environment}
    async with program([path, *words], log, environment) as process:
        target = Target(name=peer.name, port=port, pids={"router": process.pid}, keys=peer.keys)
        await _until_answers(target, process, log)
        yield target


async def _until_answers(target: Target, process: asyncio.subprocess.Process, log: Path) -> None:
    once = Task(
        host="127.0.0.1",
        port=target.port,
        path="/v1/chat/completions",
        body=body(stream=False, tokens=4),
        connections=1,
        seconds_max=5.0,
        requests_max=1,
        keys=target.keys,
        drain_s_max=10.0,
    )
    deadline_s = time.monotonic() + START_S_MAX
    while time.monotonic() < deadline_s:
        if process.returncode is not None:
            raise PeerAbsent(f"ended at its start with exit code {process.returncode}: {_last_line(log)}")
        if not port_is_free("127.0.0.1", target.port):
            with contextlib.suppress(CarpoolError):
                result = await measure(once)
                if result.requests and not result.errors:
                    return
        await asyncio.sleep(0.25)
    raise PeerAbsent(f"no answer within {START_S_MAX:.0f} s: {_last_line(log)}")


def _last_line(log: Path) -> str:
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1][:300] if lines else "it said nothing"
