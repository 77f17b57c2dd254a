"""The proof of the scheduler: capacity moves with demand, a killed leader's successor finishes what was under way, people's
word wins, and every decision can be explained and decided again.

Each oracle starts a pool of its own: an embedded bus, two agents with one CPU device each, two schedulers of which one
leads. ``seed`` changes prompts and the instants of requests.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ops.control import control
from ops.prove.workplace import (
    Figures,
    Oracle,
    Say,
    ask,
    client_of,
    run_oracles,
    running_pool,
    service,
    until,
)
from ops.supervisor import Pool
from subjects import codec, names
from subjects.bus import BusMessage
from subjects.errors import CarpoolError
from subjects.messages import (
    JournalRecord,
    Lease,
    TransactionBegan,
    TransactionEnded,
    UnloadReplica,
    WorkerCommand,
)
from subjects.nats_bus import NatsBus

LEAD_S_MAX = 2.0
"""From the leader's death to its successor's lead (SCH-12)."""
FINISH_S_MAX = 15.0
"""From the leader's death to the end of the transaction that it left: the lease, listening, an unload and a load."""
LEADER_KEY = "scheduler"
STANDBY = "scheduler-2"
SECOND_WORKER = "worker-2"


async def run(say: Say, only: tuple[str, ...], seed: int = 0) -> dict[str, Any]:
    """All oracles (or those named in ``only``) in turn; every figure with its bound beside it, and ``ok``."""
    return await run_oracles("scheduler", ORACLES, say, only, seed)


# ------------------------------------------------------------------------------------------------------------ a workplace


@contextlib.asynccontextmanager
async def _two_of_each(
    directory: Path, services: str, device: str, *, record: Path | None = None, policy: str = "rules"
) -> AsyncIterator[Pool]:
    """A pool with two agents and two schedulers."""
    flags = ["--policy", policy]
    more = {
        STANDBY: ["scheduler", "--id", "standby", *flags],
        SECOND_WORKER: ["worker", "--id", "second", "--device", device, "--threads", "1"],
    }
    first = [*flags, *(["--record", str(record)] if record is not None else [])]
    worker_flags = ("--id", "first", "--threads", "1")
    async with running_pool(directory, services, device, *worker_flags, scheduler_flags=first, more=more) as pool:

        async def both() -> bool:
            rows = await control(pool.nats_url, "get", {"what": "devices"}) or []
            return len(rows) == 2

        if not await until(both, 30):
            raise CarpoolError("the second worker did not come up")
        yield pool


@dataclass(slots=True)
class _Wiretap:
    """What the bus carries: commands once per operation, and who leads."""

    bus: NatsBus
    commands: dict[str, tuple[float, WorkerCommand]] = field(default_factory=dict)
    holders: list[tuple[float, str, int]] = field(default_factory=list)
    """When a scheduler's lease was first seen, its name and its epoch."""
    on_command: Callable[[WorkerCommand], None] | None = None

    def _heard(self, message: BusMessage) -> None:
        command: WorkerCommand = codec.decode(message.payload, WorkerCommand)  # type: ignore[arg-type]
        if command.operation not in self.commands:
            self.commands[command.operation] = (time.monotonic(), command)
            if self.on_command is not None:
                self.on_command(command)

    def _lease(self, key: str, entry: Any) -> None:
        if key != LEADER_KEY or entry is None:
            return
        lease = codec.decode(entry.value, Lease)
        if not self.holders or self.holders[-1][1] != lease.holder:
            self.holders.append((time.monotonic(), lease.holder, lease.epoch))

    @property
    def leader(self) -> str:
        """Who leads, as far as the bucket says."""
        return self.holders[-1][1] if self.holders else ""

    async def journal(self) -> list[JournalRecord]:
        """All records of the journal."""
        messages = await self.bus.stream_read(names.JOURNAL_STREAM, messages_max=10_000)
        return [codec.decode(message.payload, JournalRecord) for message in messages]


@contextlib.asynccontextmanager
async def _wiretap(pool: Pool) -> AsyncIterator[_Wiretap]:
    bus = await NatsBus.connect([pool.nats_url], name="carpool-wiretap")
    tap = _Wiretap(bus)
    try:
        await bus.subscribe(f"{names.PREFIX}.cmd.*", tap._heard)
        await bus.kv_watch(names.LEADER_BUCKET, tap._lease)
        yield tap
    finally:
        await bus.close()


def _part_of(holder: str) -> str:
    return STANDBY if holder.startswith("standby-") else "scheduler"


# --------------------------------------------------------------------------------------------------- a killed leader


async def prove_successor(directory: Path, rng: random.Random, say: Say) -> Figures:
    """The leader is killed when the victim of a swap has drained and the newcomer is not loaded: its successor finishes the
    swap, under its name, and no stream notices."""
    kept = "carpool_sim"
    services = "".join(_costed(name, load_s=1.0) for name in ("old", "new", "steady"))
    async with (
        _two_of_each(directory, services, "cpu:700MiB") as pool,
        client_of(pool) as client,
        _wiretap(pool) as tap,
    ):
        for name in ("steady", "old"):
            answer = await ask(client, name, "go", 2, stream=True)
            if not answer.whole:
                raise CarpoolError(f"{name} was not answered: {answer.error}")
        long = asyncio.create_task(ask(client, "steady", "go", 240, stream=True, **{kept: {"token_s": 0.05}}))
        killed: asyncio.Future[tuple[str, float, str]] = asyncio.get_running_loop().create_future()
        leader, leader_pid = tap.leader, pool.pid(_part_of(tap.leader))

        def strike(command: WorkerCommand) -> None:
            if isinstance(command, UnloadReplica) and command.replica.startswith("old-") and not killed.done():
                _kill(leader_pid)
                killed.set_result((command.operation, time.monotonic(), leader))

        tap.on_command = strike
        asked = asyncio.create_task(ask(client, "new", "go", 4, stream=True))
        operation, killed_s, dead = await asyncio.wait_for(killed, 60)
        say(f"successor: {dead} was killed between the unload of old and the load of new")
        answer = await asked
        steady = await long

        async def ended() -> bool:
            return any(isinstance(entry, TransactionEnded) for entry in _of(await tap.journal(), swap))

        swap = _swap_of(await tap.journal(), operation)
        finished = await until(ended, FINISH_S_MAX)
        entries = [(record.writer, entry) for record in await tap.journal() for entry in record.entries]
        begun_by = [w for w, e in entries if isinstance(e, TransactionBegan) and e.transaction == swap]
        ends = [(w, e) for w, e in entries if isinstance(e, TransactionEnded) and e.transaction == swap]
        told = await control(pool.nats_url, "explain", {"what": swap})
        why = await control(pool.nats_url, "explain", {"what": "new"})
        loads = [command for _, command in tap.commands.values() if getattr(command, "replica_name", "").startswith("new-")]
    lead_s = next((at_s - killed_s for at_s, holder, _ in tap.holders if at_s > killed_s and holder != dead), float("inf"))
    say(f"successor: {told['outcome']}: " + "; ".join(step["what"] for step in told["steps"]))
    figures = {
        "successor_leads_s": round(lead_s, 2),
        "successor_leads_s_max": LEAD_S_MAX,
        "newcomer_answers_s": round(answer.ended_s - killed_s, 2),
        "newcomer_answers_s_max": FINISH_S_MAX,
        "swap": swap,
        "swap_begun_by": begun_by,
        "swap_ended_by": [writer for writer, _ in ends],
        "swap_outcome": told["outcome"],
        "swap_steps": [f"{step['what']}: {step['outcome']}" for step in told["steps"]],
        "newcomer_loads": len(loads),
        "steady_stream_attempts": steady.attempt,
        "why_new_is_there": why["why"],
    }
    held = {
        f"successor_leads_s <= {LEAD_S_MAX:g}": lead_s <= LEAD_S_MAX,
        f"newcomer_answers_s <= {FINISH_S_MAX:g}": answer.whole and answer.ended_s - killed_s <= FINISH_S_MAX,
        "the swap was begun by the dead leader": begun_by == [dead],
        "the swap was finished by its successor": finished
        and len(ends) == 1
        and ends[0][0] != dead
        and ends[0][1].failure == "",
        "the newcomer was loaded once": len(loads) == 1,
        "the stream beside it did not notice": steady.whole and steady.attempt == 1,
        "explain tells the swap step by step": told["outcome"] == "done" and len(told["steps"]) >= 3,
        "explain tells why": any("old" in line or "waiting" in line for line in why["why"]),
    }
    return figures, held


def _kill(pid: int) -> None:
    import os
    import signal

    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def _of(records: list[JournalRecord], transaction: str) -> list[object]:
    return [entry for record in records for entry in record.entries if entry.transaction == transaction]


def _swap_of(records: list[JournalRecord], operation: str) -> str:
    """The transaction that an operation belongs to."""
    found = [
        entry.transaction for record in records for entry in record.entries if getattr(entry, "operation", "") == operation
    ]
    if not found:
        raise CarpoolError("the journal does not know the operation at which the leader was killed")
    return found[0]


COSTS = "costs: {cpu: {prefill_token_s: 1.0e-5, step_const_s: 0.01, step_request_s: 1.0e-4}}"


def _costed(name: str, *, load_s: float) -> str:
    """A simulated model of 600 MB with costs, so that the coordinator decides about it."""
    engine = (
        "type: simulated, max_num_seqs: 8, max_context_len: 2048, kv_cache_bytes: 64MiB, "
        f"options: {{load_s: {load_s}, step_const_s: 0.01, step_request_s: 0.0001, prefill_token_s: 0.00001}}"
    )
    return service(name, "", engine, resources=f"baseline_memory_gb: 0.5, {COSTS}", strategy="max_wait_s: 110")


ORACLES: tuple[Oracle, ...] = (prove_successor,)
