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

from broker.scheduler.policies import make_policy
from broker.scheduler.recording import replay
from ops.control import control
from ops.prove.workplace import (
    Answer,
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
from subjects import messages as m
from subjects.bus import BusMessage
from subjects.errors import CarpoolError
from subjects.nats.bus import NatsBus

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
    directory: Path, services: str, device: str, *, record: bool = False, policy: str = "carpool"
) -> AsyncIterator[Pool]:
    """A pool with two agents and two schedulers."""
    flags = ["--policy", policy]
    recording = [["--record", str(path)] for path in _recordings(directory)] if record else [[], []]
    more = {
        STANDBY: ["scheduler", "--id", "standby", *flags, *recording[1]],
        SECOND_WORKER: ["worker", "--id", "second", "--device", device, "--threads", "1"],
    }
    worker_flags = ("--id", "first", "--threads", "1")
    first = [*flags, *recording[0]]
    async with running_pool(directory, services, device, *worker_flags, scheduler_flags=first, more=more) as pool:

        async def both() -> bool:
            rows = await control(pool.nats_url, "get", {"what": "devices"}) or []
            return len(rows) == 2

        if not await until(both, 30):
            raise CarpoolError("the second worker did not come up")
        yield pool


def _recordings(directory: Path) -> tuple[Path, Path]:
    """Whoever leads, what it hears and orders is recorded."""
    return directory / "first.rec", directory / "standby.rec"


@dataclass(slots=True)
class _Wiretap:
    """What the bus carries: commands once per operation, and who leads."""

    bus: NatsBus
    commands: dict[str, tuple[float, m.WorkerCommand]] = field(default_factory=dict)
    holders: list[tuple[float, str, int]] = field(default_factory=list)
    """When a scheduler's lease was first seen, its name and its epoch."""
    on_command: Callable[[m.WorkerCommand], None] | None = None

    def _heard(self, message: BusMessage) -> None:
        command: m.WorkerCommand = codec.decode(message.payload, m.WorkerCommand)  # type: ignore[arg-type]
        if command.operation not in self.commands:
            self.commands[command.operation] = (time.monotonic(), command)
            if self.on_command is not None:
                self.on_command(command)

    def _lease(self, key: str, entry: Any) -> None:
        if key != LEADER_KEY or entry is None:
            return
        lease = codec.decode(entry.value, m.Lease)
        if not self.holders or self.holders[-1][1] != lease.holder:
            self.holders.append((time.monotonic(), lease.holder, lease.epoch))

    @property
    def leader(self) -> str:
        """Who leads, as far as the bucket says."""
        return self.holders[-1][1] if self.holders else ""

    async def journal(self) -> list[m.JournalRecord]:
        """All records of the journal."""
        messages = await self.bus.stream_read(names.JOURNAL_STREAM, messages_max=10_000)
        return [codec.decode(message.payload, m.JournalRecord) for message in messages]


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

        def strike(command: m.WorkerCommand) -> None:
            if isinstance(command, m.UnloadReplica) and command.replica.startswith("old-") and not killed.done():
                _kill(leader_pid)
                killed.set_result((command.operation, time.monotonic(), leader))

        tap.on_command = strike
        asked = asyncio.create_task(ask(client, "new", "go", 4, stream=True))
        operation, killed_s, dead = await asyncio.wait_for(killed, 60)
        say(f"successor: {dead} was killed between the unload of old and the load of new")
        answer = await asked
        steady = await long

        async def ended() -> bool:
            return any(isinstance(entry, m.TransactionEnded) for entry in _of(await tap.journal(), swap))

        swap = _swap_of(await tap.journal(), operation)
        finished = await until(ended, FINISH_S_MAX)
        entries = [(record.writer, entry) for record in await tap.journal() for entry in record.entries]
        begun_by = [w for w, e in entries if isinstance(e, m.TransactionBegan) and e.transaction == swap]
        ends = [(w, e) for w, e in entries if isinstance(e, m.TransactionEnded) and e.transaction == swap]
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


def _of(records: list[m.JournalRecord], transaction: str) -> list[object]:
    return [entry for record in records for entry in record.entries if entry.transaction == transaction]


def _swap_of(records: list[m.JournalRecord], operation: str) -> str:
    """The transaction that an operation belongs to."""
    found = [
        entry.transaction for record in records for entry in record.entries if getattr(entry, "operation", "") == operation
    ]
    if not found:
        raise CarpoolError("the journal does not know the operation at which the leader was killed")
    return found[0]


def _costed(name: str, *, load_s: float) -> str:
    """A simulated model of 600 MB whose load takes a while."""
    engine = (
        "type: simulated, max_num_seqs: 8, max_context_len: 2048, kv_cache_bytes: 64MiB, "
        f"options: {{kv_bytes_per_token: 1024, load_s: {load_s}}}"
    )
    return service(name, "", engine, resources="baseline_memory_gb: 0.5", strategy="max_wait_s: 110")


# ------------------------------------------------------------------------------------------------- capacity that moves

MODELS = ("a", "b", "c")
HIGH_RPS, LOW_RPS = 6.0, 0.4
OUTPUT_TOKENS = 24
MOVED_S_MAX = 90.0
"""From the turn of the load to a second replica of the model that is busy now: what the coordinator waits to be sure, a
drain, a load beside everything else on two cores, and one takeover by a standby."""
STEADY_S = 5.0
"""A load has settled when capacity has fitted it this long."""
COSTS = {"prefill_token_s": 2e-4, "step_const_s": 0.01, "step_request_s": 0.008}
"""Given, not measured: a slow device, so that a load which two cores can really carry needs more than one of them."""


@dataclass(slots=True)
class _Watch:
    """Ready replicas per model, as they were last seen, and the devices that they are on."""

    ready: dict[str, list[str]] = field(default_factory=dict)
    history: list[tuple[float, dict[str, int]]] = field(default_factory=list)

    async def run(self, pool: Pool) -> None:
        """Looks twice a second until cancelled; a look that nobody answers, while nobody leads, is left out."""
        begun_s = time.monotonic()
        while True:
            with contextlib.suppress(CarpoolError):
                rows = await control(pool.nats_url, "get", {"what": "replicas"}, timeout_s=1.0) or []
                ready: dict[str, list[str]] = {name: [] for name in MODELS}
                for row in rows:
                    if row["state"] == "ready":
                        ready.setdefault(row["model"], []).append(f"{row['worker']}/{row['device']}")
                counts = {name: len(places) for name, places in ready.items()}
                if not self.history or self.history[-1][1] != counts:
                    self.history.append((round(time.monotonic() - begun_s, 1), counts))
                self.ready = ready
            await asyncio.sleep(0.5)

    def has_two(self, name: str, other: str) -> bool:
        """Whether ``name`` serves from two devices and ``other`` from one."""
        return len(set(self.ready.get(name, ()))) == 2 and len(self.ready.get(other, ())) == 1


async def prove_moves(directory: Path, rng: random.Random, say: Say) -> Figures:
    """Three tiny vLLM models on two devices. When the load turns from one to another, the coordinator takes a replica from
    the one and gives it to the other. The leader is killed in the middle of that; every request is answered whole, and
    what both leaders decided is decided the same again from their recordings."""
    return await _moves(directory, rng, say, _tiny)


async def _moves(directory: Path, rng: random.Random, say: Say, make: Callable[[str, int], str]) -> Figures:
    services = "".join(make(name, number) for number, name in enumerate(MODELS))
    watch = _Watch()
    killed: list[tuple[float, str, str]] = []
    async with (
        _two_of_each(directory, services, "cpu:1GiB", record=True) as pool,
        client_of(pool) as client,
        _wiretap(pool) as tap,
    ):
        watching = asyncio.create_task(watch.run(pool))

        def strike(command: m.WorkerCommand) -> None:
            if isinstance(command, m.LoadModel) and command.record.name == "b" and not killed:
                killed.append((time.monotonic(), tap.leader, command.operation))
                _kill(pool.pid(_part_of(tap.leader)))

        try:
            say("moves: one request for each model wakes it")
            cold = await asyncio.gather(*(ask(client, name, "Hello", 4, stream=True) for name in MODELS))
            first = await _phase(client, rng, "a", lambda: watch.has_two("a", "b"), say)
            tap.on_command = strike
            second = await _phase(client, rng, "b", lambda: watch.has_two("b", "a"), say)
            end = {name: len(places) for name, places in watch.ready.items()}
            why = {name: (await control(pool.nats_url, "explain", {"what": name}))["why"] for name in MODELS}
            timeline = await control(pool.nats_url, "get", {"what": "timeline"})
            journal = await tap.journal()
        finally:
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)
    for entry in timeline:
        if entry["action"] in ("load", "evict", "unload"):
            say(f"moves: {entry['action']} {entry['model']}: {entry['reason']} ({entry['outcome']})")
    answers = [*cold, *first.answers, *second.answers]
    lost = [answer for answer in answers if not answer.whole]
    for answer in lost[:3]:
        say(f"moves: {answer.model}: status {answer.status}, {answer.error or answer.finish_reason}")
    dead = killed[0][1] if killed else ""
    swap = _swap_of(journal, killed[0][2]) if killed else ""
    ended_by = [
        (record.writer, entry.failure)
        for record in journal
        for entry in record.entries
        if isinstance(entry, m.TransactionEnded) and entry.transaction == swap
    ]
    replays = [await asyncio.to_thread(replay, path, make_policy) for path in _recordings(directory)]
    orders = sum(found.orders for found in replays)
    differences = [difference for found in replays for difference in found.differences]
    for difference in differences:
        say(f"moves: replayed differently: {difference.event} at {difference.now_s:.3f} s: {difference.recorded_orders}")
    figures = {
        "requests": len(answers),
        "requests_not_answered_whole": len(lost),
        "requests_second_attempts": sum(answer.attempt > 1 for answer in answers),
        "woken_s": round(max(answer.first_s - answer.begun_s for answer in cold), 1),
        "grown_s": first.moved_s,
        "moved_s": second.moved_s,
        "moved_s_max": MOVED_S_MAX,
        "ready_at_the_end": end,
        "history": [[at_s, counts] for at_s, counts in watch.history],
        "killed_during": swap,
        "its_end": [f"{writer}: {failure or 'done'}" for writer, failure in ended_by],
        "why": why,
        "replayed_steps": sum(found.steps for found in replays),
        "replayed_orders": orders,
        "replayed_differences": len(differences),
    }
    held = {
        "requests_not_answered_whole == 0": not lost,
        f"moved_s <= {MOVED_S_MAX:g}": second.moved_s is not None and second.moved_s <= MOVED_S_MAX,
        "the leader was killed while capacity moved": bool(killed),
        "what the dead leader had begun was ended once, by its successor": len(ended_by) == 1 and ended_by[0][0] != dead,
        "explain tells why, with numbers": all(any(c.isdigit() for line in lines for c in line) for lines in why.values()),
        "the recordings decide the same again": not differences and orders > 0,
    }
    return figures, held


@dataclass(slots=True)
class _Phase:
    answers: list[Answer]
    moved_s: float | None


async def _phase(client: Any, rng: random.Random, busy: str, moved: Callable[[], bool], say: Say) -> _Phase:
    """Poisson arrivals for each model, open loop, until the capacity has followed and a little longer."""
    say(f"moves: {HIGH_RPS:g} requests a second for {busy}, {LOW_RPS:g} for each of the others")
    begun_s = time.monotonic()
    stop = asyncio.Event()
    asked: list[asyncio.Task[Answer]] = []

    async def arrive(name: str) -> None:
        while not stop.is_set():
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(stop.wait(), rng.expovariate(HIGH_RPS if name == busy else LOW_RPS))
                return
            prompt = f"Tell {rng.randrange(10**6)}"
            asked.append(asyncio.create_task(ask(client, name, prompt, OUTPUT_TOKENS, stream=True, ignore_eos=True)))

    arriving = [asyncio.create_task(arrive(name)) for name in MODELS]

    since_s: float | None = None

    async def settled() -> bool:
        nonlocal since_s
        now_s = time.monotonic()
        since_s = None if not moved() else now_s if since_s is None else since_s
        return since_s is not None and now_s - since_s >= STEADY_S

    in_time = await until(settled, MOVED_S_MAX + STEADY_S)
    moved_s = round(since_s - begun_s, 1) if in_time and since_s is not None else None
    say(f"moves: {f'{busy} has two replicas for good after {moved_s} s' if in_time else 'nothing moved in time'}")
    stop.set()
    await asyncio.gather(*arriving)
    return _Phase(list(await asyncio.gather(*asked)), moved_s)


def _given() -> str:
    return f"costs: {{cpu: {{{', '.join(f'{name}: {value}' for name, value in COSTS.items())}}}}}"


def _tiny(name: str, number: int) -> str:
    engine = "type: vllm, dtype: float32, max_num_seqs: 8, max_context_len: 512, kv_cache_bytes: 64MiB"
    return service(name, f"builtin:tiny-{number}", engine, resources=_given(), strategy="max_wait_s: 110, max_replicas: 2")


# ----------------------------------------------------------------------------------------------------- people's word


async def prove_people(directory: Path, _rng: random.Random, say: Say) -> Figures:
    """A locked model keeps its room although others ask, until its unlock; nothing goes to a drained worker; both hold when
    the leader changes."""
    services = "".join(_costed(name, load_s=0.3) for name in ("mine", "other"))
    async with (
        _two_of_each(directory, services, "cpu:700MiB") as pool,
        client_of(pool) as client,
        _wiretap(pool) as tap,
    ):
        say("people: one worker is drained")
        await control(pool.nats_url, "drain", {"worker": "second", "bound_s": 5})
        mine = await ask(client, "mine", "go", 2, stream=True)
        await control(pool.nats_url, "lock", {"model": "mine"})
        say("people: a model is locked, and its leader killed")
        refused = await ask(client, "other", "go", 2, stream=True)
        before = tap.leader
        _kill(pool.pid(_part_of(before)))

        async def led_again() -> bool:
            return tap.leader != before

        led = await until(led_again, 10)
        again = await ask(client, "other", "go", 2, stream=True)
        await asyncio.sleep(3.0)  # Longer than the time after which an idle model would have made room.
        rows = await control(pool.nats_url, "get", {"what": "replicas"})
        still = [(row["model"], row["worker"].rpartition("-")[0]) for row in rows if row["state"] == "ready"]
        why = await control(pool.nats_url, "explain", {"what": "mine"})
        say("people: it is unlocked")
        await control(pool.nats_url, "unlock", {"model": "mine"})
        await asyncio.sleep(0.5)  # The gateway hears of it with the next digest.
        other = await ask(client, "other", "go", 2, stream=True)
        rows = await control(pool.nats_url, "get", {"what": "replicas"})
        on_drained = [row["replica"] for row in rows if row["worker"].startswith("second-")]
        locks = await control(pool.nats_url, "get", {"what": "locks"})
    figures = {
        "ready_while_locked": still,
        "why_locked": why["why"],
        "would_change": why["would_change"],
        "refused_while_locked": [refused.status, again.status, refused.error],
        "served_after_unlock_s": round(other.ended_s - other.begun_s, 2),
        "replicas_on_the_drained_worker": on_drained,
        "locks_left": [lock["kind"] for lock in locks],
    }
    held = {
        "the locked model stayed, through a change of the leader": mine.whole and led and still == [("mine", "first")],
        "explain says that a person locked it": any("locked" in line for line in why["why"])
        and any("carpool unlock mine" in line for line in why["would_change"]),
        "requests that cannot have its room are told so": refused.status == again.status == 503,
        "the other model was served after the unlock": other.whole,
        "nothing went to the drained worker": not on_drained and figures["locks_left"] == ["worker-drain"],
    }
    return figures, held


ORACLES: tuple[Oracle, ...] = (prove_moves, prove_successor, prove_people)
