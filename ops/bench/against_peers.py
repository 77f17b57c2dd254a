"""``carpool bench gateway --peers``: direct, ours and the routers that others wrote, by turns, on one fake engine.

Ours is the whole path: gateway with API keys, tenants, profile and tokenising; NATS; a replica shell whose scripted engine
takes no time. The peers stand before the fake engine, which is also asked directly. Every figure is a median over rounds in
which each system had its turn, so that what else the machine does at a time meets all of them.
"""

from __future__ import annotations

import contextlib
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import msgspec

from ops.bench.fake_engine import STREAM_CHUNKS
from ops.bench.idle import idle_growth_mb
from ops.bench.load import Result, Task, measure
from ops.bench.peers import KEYS, PEERS, PeerAbsent, Target, body, fake_engine, started
from ops.bench.processes import NOTHING, bus_messages, use_by_part
from ops.bench.ratios import Figures, SystemReport, ratios
from ops.control import control
from ops.models import make_tiny_model, records_of
from ops.servers import free_port
from ops.supervisor import Pool, PoolOptions
from subjects.errors import CarpoolError

Kind = Literal["whole", "stream"]
_KINDS: tuple[Kind, ...] = ("whole", "stream")
_ANSWER_TOKENS = 4
_DRAIN_S_MAX = 15.0
"""A system that is asked for more than it can answer is not waited for longer; its figures are of what it had answered."""
_PARTS = ("gateway", "nats", "scheduler", "worker", "valkey")


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How long and how often. The defaults take about a quarter of an hour with four peers."""

    connections: tuple[int, ...] = (16, 256)
    seconds: float = 4.0
    rounds: int = 3
    pairs: int = 10
    pair_seconds: float = 2.0
    rate_per_s: float = 100.0
    rate_connections: int = 16
    idle_streams: int = 1000


@dataclass(frozen=True, slots=True)
class _Turn:
    """One measurement of one system: what the load saw, and what the system's parts used meanwhile."""

    result: Result
    cpu_s: dict[str, float]
    bus_messages: int


@dataclass(slots=True)
class _System:
    target: Target
    turns: dict[tuple[int, Kind], list[_Turn]] = field(default_factory=dict)
    added_ms: list[float] = field(default_factory=list)
    rss_mb: dict[str, float] = field(default_factory=dict)
    idle_mb: dict[str, float] = field(default_factory=dict)
    idle_reason: str = ""


async def bench_against_peers(say: Callable[[str], None], plan: Plan) -> dict[str, Any]:
    """Measures and returns the figures: rates per second, times in milliseconds, memory in 10^6 bytes.

    Raises:
        CarpoolError: direct or ours did not start or answered with errors, so that there is nothing to compare.
    """
    started_s = time.monotonic()
    absent: dict[str, str] = {}
    with tempfile.TemporaryDirectory(prefix="carpool-bench-", ignore_cleanup_errors=True) as temporary:
        directory = Path(temporary)
        monitor_port = free_port("127.0.0.1")
        async with contextlib.AsyncExitStack() as stack:
            engine = await stack.enter_async_context(fake_engine(directory))
            ours = await stack.enter_async_context(_ours(directory, monitor_port))
            systems = [_System(engine), _System(ours)]
            for peer in PEERS:
                try:
                    target = await stack.enter_async_context(started(peer, engine.port, directory, say))
                except PeerAbsent as reason:
                    absent[peer.name] = str(reason)
                    say(f"{peer.name} is not measured: {reason}")
                else:
                    systems.append(_System(target))
            measured = _Measured(systems, monitor_port, plan, say)
            # First, while no memory that earlier load has left behind can be used again.
            await measured.idle()
            await measured.warm()
            for number in range(plan.rounds):
                await measured.round(number)
            await measured.paired()
    reports = {system.target.name: _report(system, plan) for system in systems}
    reports |= {name: SystemReport(reason=reason) for name, reason in absent.items()}
    return {
        "bench": "gateway-peers",
        "connections": list(plan.connections),
        "rounds": plan.rounds,
        "seconds": plan.seconds,
        "took_s": round(time.monotonic() - started_s, 1),
        "systems": msgspec.to_builtins(reports),
        "ratios": ratios(reports),
    }


@contextlib.asynccontextmanager
async def _ours(directory: Path, monitor_port: int) -> AsyncIterator[Target]:
    """The pool with tenants' keys, a model that answers at once, and one whose steps take long (for idle streams)."""
    tiny = make_tiny_model("bench", seed=1, directory=directory / "tiny")
    documents = [
        "apiVersion: llm.serving/v1\nkind: ModelService\nmetadata: {name: %s}\nspec:\n  tokenizer: %s\n"  # noqa: UP031
        "  strategy: {queue_requests_max: 2048}\n"
        "  engine: {type: simulated, max_num_seqs: %d, max_context_len: 2048, kv_cache_bytes: 1GiB, options: {%s}}\n"
        % (name, msgspec.json.encode(str(tiny)).decode(), slots, options)
        for name, slots, options in (
            ("bench", 256, "mode: instant"),
            ("bench-idle", 1024, "step_const_s: 1.0, prefill_token_s: 0, prefill_token2_s: 0, kv_pages: 65536"),
        )
    ]
    services = directory / "bench.yaml"
    services.write_text("---\n".join(documents))
    keys = directory / "keys.yaml"
    keys.write_text("keys:\n" + "".join(f"- {{key: {key}, tenant: tenant-{index}}}\n" for index, key in enumerate(KEYS)))
    options = PoolOptions(
        state_dir=directory / "state",
        devices=("cpu:4GiB",),
        nats_monitor_port=monitor_port,
        gateway_flags=("--api-keys", str(keys)),
    )
    async with Pool(options) as pool:
        records = [msgspec.to_builtins(record) for record in records_of([services])]
        await control(pool.nats_url, "apply", {"records": records})
        port = int(pool.http_url.rpartition(":")[2])
        yield Target(name="ours", port=port, pids={part: pool.pid(part) for part in _PARTS}, idle_model="bench-idle")


class _Measured:
    """The turns of a run."""

    def __init__(self, systems: Sequence[_System], monitor_port: int, plan: Plan, say: Callable[[str], None]) -> None:
        self._systems = systems
        self._monitor_port = monitor_port
        self._plan = plan
        self._say = say

    def _task(self, target: Target, kind: Kind, connections: int, seconds: float, rate_per_s: float = 0.0) -> Task:
        stream = kind == "stream"
        return Task(
            host="127.0.0.1",
            port=target.port,
            path="/v1/chat/completions",
            body=body(stream=stream, tokens=STREAM_CHUNKS if stream else _ANSWER_TOKENS),
            connections=connections,
            seconds_max=seconds,
            rate_per_s=rate_per_s,
            keys=target.keys,
            drain_s_max=_DRAIN_S_MAX,
        )

    async def warm(self) -> None:
        """Wakes our model and lets everybody's first requests be over."""
        self._say("warming up " + ", ".join(system.target.name for system in self._systems))
        for system in self._systems:
            for kind in _KINDS:
                _checked(
                    system.target, kind, await measure(self._task(system.target, kind, 4, min(1.0, self._plan.seconds)))
                )

    async def round(self, number: int) -> None:
        """Each system's turn at each number of connections, whole and streamed; another one begins in each round."""
        first = number % len(self._systems)
        for connections in self._plan.connections:
            for kind in _KINDS:
                self._say(f"round {number + 1} of {self._plan.rounds}: {connections} connections, {kind}")
                for system in [*self._systems[first:], *self._systems[:first]]:
                    turn = await self._turn(system, kind, connections)
                    system.turns.setdefault((connections, kind), []).append(turn)
                    rss_mb = {part: use.rss_mb for part, use in use_by_part(system.target.pids).items()}
                    system.rss_mb = {part: max(mb, system.rss_mb.get(part, 0.0)) for part, mb in rss_mb.items()}

    async def _turn(self, system: _System, kind: Kind, connections: int) -> _Turn:
        target, ours = system.target, system.target.name == "ours"
        before = use_by_part(target.pids)
        messages = await bus_messages(self._monitor_port) if ours else 0
        result = await _asked(target, self._task(target, kind, connections, self._plan.seconds))
        if ours:
            messages = await bus_messages(self._monitor_port) - messages
        after = use_by_part(target.pids)
        _checked(target, kind, result)
        return _Turn(result, {part: use.cpu_s - before.get(part, NOTHING).cpu_s for part, use in after.items()}, messages)

    async def paired(self) -> None:
        """What each system adds to the median of an answer when it has little to do, direct and through it by turns."""
        plan = self._plan
        direct, others = self._systems[0], self._systems[1:]
        for number in range(plan.pairs):
            self._say(f"pair {number + 1} of {plan.pairs}: {plan.rate_per_s:.0f} requests per second")
            for system in others:
                p50_ms = []
                for target in (direct.target, system.target):
                    task = self._task(target, "whole", plan.rate_connections, plan.pair_seconds, plan.rate_per_s)
                    result = _checked(target, "whole", await _asked(target, task))
                    if result.requests:
                        p50_ms.append(result.p50_ms)
                if len(p50_ms) == 2:
                    system.added_ms.append(p50_ms[1] - p50_ms[0])

    async def idle(self) -> None:
        """What streams that say nothing hold."""
        for system in self._systems[1:]:
            self._say(f"{self._plan.idle_streams} idle streams through {system.target.name}")
            try:
                system.idle_mb = await idle_growth_mb(system.target, self._plan.idle_streams)
            except CarpoolError as error:
                system.idle_reason = str(error)


async def _asked(target: Target, task: Task) -> Result:
    """What ``measure`` says; where nobody listens any more, all connections are errors."""
    try:
        return await measure(task)
    except CarpoolError:
        return Result(requests=0, errors=task.connections, seconds=task.seconds_max, events=0, p50_ms=0.0, p99_ms=0.0)


def _checked(target: Target, kind: Kind, result: Result) -> Result:
    """Errors of direct and ours end the run; a peer's are counted in its report."""
    if target.name in ("direct", "ours"):
        if result.errors or not result.requests:
            raise CarpoolError(f"bench: {result.errors} answers of {target.name} were errors, {result.requests} were whole")
        if kind == "stream" and result.events < STREAM_CHUNKS * result.requests:
            raise CarpoolError(f"bench: {target.name} put several chunks into one event")
    return result


def _report(system: _System, plan: Plan) -> SystemReport:
    by_connections = {str(number): _figures(system, number) for number in plan.connections}
    first = by_connections[str(plan.connections[0])]
    scale = 1000 / plan.idle_streams
    return SystemReport(
        rps=first.rps,
        p50_ms=first.p50_ms,
        p99_ms=first.p99_ms,
        stream_chunks_per_s=first.stream_chunks_per_s,
        rss_mb=round(sum(system.rss_mb.values()), 1),
        rss_mb_by_part={part: round(mb, 1) for part, mb in system.rss_mb.items()},
        added_p50_ms=round(statistics.median(system.added_ms), 3) if system.added_ms else None,
        idle_mb_per_1000_streams=round(sum(system.idle_mb.values()) * scale, 1) if system.idle_mb else None,
        idle_mb_by_part={part: round(mb * scale, 1) for part, mb in system.idle_mb.items()},
        idle_reason=system.idle_reason,
        by_connections=by_connections,
    )


def _figures(system: _System, connections: int) -> Figures:
    whole, stream = system.turns[(connections, "whole")], system.turns[(connections, "stream")]
    return Figures(
        rps=round(statistics.median(turn.result.requests / turn.result.seconds for turn in whole), 1),
        p50_ms=round(statistics.median(turn.result.p50_ms for turn in whole), 3),
        p99_ms=round(statistics.median(turn.result.p99_ms for turn in whole), 3),
        stream_chunks_per_s=round(statistics.median(_chunks(turn) / turn.result.seconds for turn in stream), 1),
        stream_p50_ms=round(statistics.median(turn.result.p50_ms for turn in stream), 3),
        stream_p99_ms=round(statistics.median(turn.result.p99_ms for turn in stream), 3),
        errors=sum(turn.result.errors for turn in (*whole, *stream)),
        cut=sum(turn.result.cut for turn in (*whole, *stream)),
        cpu_ms_per_request=_by_part(whole, lambda turn: 1e3 / max(1, turn.result.requests)),
        cpu_us_per_chunk=_by_part(stream, lambda turn: 1e6 / max(1, _chunks(turn))),
        bus_messages_per_request=round(statistics.median(_per_request(turn) for turn in whole), 2),
        bus_messages_per_stream=round(statistics.median(_per_request(turn) for turn in stream), 2),
    )


def _chunks(turn: _Turn) -> int:
    """Chunks with text: a stream's first and closing events are no chunks. What a stream that was cut had got counts."""
    result = turn.result
    return min(result.events, STREAM_CHUNKS * (result.requests + result.cut))


def _per_request(turn: _Turn) -> float:
    return turn.bus_messages / max(1, turn.result.requests)


def _by_part(turns: Sequence[_Turn], scale: Callable[[_Turn], float]) -> dict[str, float]:
    return {
        part: round(statistics.median(turn.cpu_s.get(part, 0.0) * scale(turn) for turn in turns), 3)
        for part in turns[-1].cpu_s
    }
