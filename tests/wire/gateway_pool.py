"""A gateway on a real bus, and scripted replicas that keep the wire protocol: what the gateway's tests are made of."""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx
from openai import AsyncOpenAI

from broker.gateway.app import HttpApp, HttpOptions
from broker.gateway.gateway import Gateway, GatewayOptions
from broker.gateway.keys import ApiKeys
from broker.gateway.nats_ingress import NatsIngress
from broker.http.server import HttpServer
from profiles.deployment import with_deployment
from subjects import names
from subjects.bus import BusMessage, QueuedTicket
from subjects.codec import decode, encode
from subjects.errors import BusError
from subjects.ids import DeviceId, ModelHash, ReplicaId, RequestId, WorkerId, incarnated, model_key
from subjects.messages import (
    Back,
    Cancel,
    Claim,
    ClaimReply,
    Delta,
    EngineType,
    Failure,
    Frames,
    Gone,
    Grant,
    Held,
    IngressTelemetry,
    Lane,
    ModelRecord,
    PoolDigest,
    PoolModel,
    PoolReplica,
    ReplicaState,
    Resend,
    SlaClass,
    Ticket,
    Usage,
)
from subjects.nats.bus import NatsBus
from subjects.tasks import end_tasks
from tests.waiting import until

UNCONFIRMED_S = 0.5
PULL_S = 0.5
WAIT_S = 15.0
"""Bound of every wait in these tests: generous, since the machine may be busy."""
_numbers = itertools.count(1)


def record(name: str = "", **fields: Any) -> ModelRecord:
    """A model without a tokenizer of its own; counts are estimates."""
    number = next(_numbers)
    given: dict[str, Any] = {
        "name": name or f"model-{number}",
        "model_hash": ModelHash(f"{number:016x}" + "9" * 48),
        "weights_hash": "w",
        "engine_type": EngineType.SIMULATED,
        "source": "simulated",
        "weights_bytes": 1 << 20,
        "kv_bytes_per_token": 1024,
        "kv_bytes": 1 << 20,
        "budget_bytes": 1 << 21,
        "max_context_len": 2048,
    }
    return with_deployment(ModelRecord(**(given | fields)))


# -------------------------------------------------------------------------------------------------------------- replicas


@dataclass
class Run:
    """One granted request at a scripted replica."""

    replica: ScriptedReplica
    ticket: Ticket
    grant: Grant
    body: dict[str, Any]
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    """The answer is complete and confirmed, or nobody wants it."""
    cancelled_by: str = ""
    sent: list[tuple[float, Delta]] = field(default_factory=list)
    next_index: dict[int, int] = field(default_factory=dict)
    unnamed: int = 0

    async def say(self, text: str, *, choice: int = 0, finish: str | None = None, detail: Any = None) -> None:
        """One delta of one chunk."""
        await self._send(text=text, choice=choice, units=1, finish_reason=finish, detail=detail)

    async def end(
        self,
        *,
        usage: tuple[int, int] | None = (17, 5),
        finish: str | None = "stop",
        failure: Failure | None = None,
        choice: int = 0,
    ) -> None:
        """The last delta; it only closes."""
        counts = None if usage is None or failure else Usage(prompt_tokens=usage[0], completion_tokens=usage[1])
        await self._send(
            text="",
            choice=choice,
            units=0,
            finish_reason=None if failure else finish,
            end=True,
            usage=counts,
            failure=failure,
        )

    async def _send(self, *, text: str, choice: int, units: int, detail: Any = None, **fields: Any) -> None:
        index = self.next_index.get(choice, 0)
        self.next_index[choice] = index + units
        delta = Delta(
            request=self.ticket.request,
            attempt=self.ticket.attempt,
            choice=choice,
            first_token_index=index,
            units=units,
            text=text,
            detail=json.dumps(detail).encode() if detail is not None else b"",
            **fields,
        )
        self.sent.append((time.monotonic(), delta))
        await self.replica.send_frames(self.ticket, [delta])


Script = Callable[[Run], Awaitable[None]]


async def answer_hello(run: Run) -> None:
    """The usual answer: two chunks."""
    await run.say("Hello ")
    await run.say("world")
    await run.end()


class ScriptedReplica:
    """Pulls, claims, acknowledges, sends frames, confirms by ``Held``; what it generates is a script."""

    def __init__(self, bus: NatsBus, model: ModelRecord, script: Script, *, slots: int, classes: Sequence[SlaClass]) -> None:
        self.id = ReplicaId(incarnated("scripted"))
        self.model = model
        self.script = script
        self.runs: list[Run] = []
        self.tickets: list[Ticket] = []
        self.refused: list[str] = []
        self.knows_adapters = True
        """Whether its claims say so; those of an older version did not."""
        self._bus = bus
        self._slots = slots
        self._classes = classes
        self._frames = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self._free = slots
        self._stack = AsyncExitStack()

    @property
    def running(self) -> list[Run]:
        """Runs that have not ended."""
        return [run for run in self.runs if not run.ended.is_set()]

    async def start(self) -> None:
        """Begins to pull."""
        back = await self._bus.subscribe(names.back(self.id), self._on_back)
        self._stack.push_async_callback(back.stop)
        for sla_class in self._classes:
            for lane in Lane:
                self._spawn(self._pull(sla_class, lane))

    async def stop(self) -> None:
        """Falls silent, as a death would."""
        await end_tasks(list(self._tasks))
        await self._stack.aclose()

    async def _pull(self, sla_class: SlaClass, lane: Lane) -> None:
        done = asyncio.Event()

        def on_ticket(ticket: QueuedTicket) -> None:
            done.set()
            self._spawn(self._take(ticket))

        def on_expired(credits: int) -> None:
            done.set()

        key = model_key(self.model.deployment)
        puller = await self._bus.open_puller(key, sla_class, lane, on_ticket=on_ticket, on_expired=on_expired)
        self._stack.push_async_callback(puller.stop)
        while True:
            done.clear()
            if self._free > 0:
                try:
                    await puller.pull(1, PULL_S)
                    await asyncio.wait_for(done.wait(), 3 * PULL_S)
                    continue
                except (BusError, TimeoutError):
                    pass
            await asyncio.sleep(0.02)

    async def _take(self, queued: QueuedTicket) -> None:
        ticket = decode(queued.payload, Ticket)
        self.tickets.append(ticket)
        self._free -= 1
        try:
            grant = await self._claim(ticket)
            await self._bus.queue_ack(queued.token)
            if grant is None:
                return
            run = Run(self, ticket, grant, json.loads(grant.body))
            self.runs.append(run)
            script = asyncio.ensure_future(self.script(run))
            await asyncio.wait({script, asyncio.ensure_future(run.ended.wait())}, return_when=asyncio.FIRST_COMPLETED)
            if not script.done():
                await end_tasks({script})
            else:
                script.result()
            await run.ended.wait()
        finally:
            self._free += 1

    async def _claim(self, ticket: Ticket) -> Grant | None:
        parts: list[Grant] = []
        while not parts or len(parts) < parts[0].parts:
            claim = Claim(
                request=ticket.request,
                attempt=ticket.attempt,
                replica=self.id,
                part=len(parts),
                adapters=self.knows_adapters,
            )
            raw = await self._bus.request(names.claim(ticket.ingress), encode(claim), timeout_s=2.0)
            reply: ClaimReply = decode(raw, ClaimReply)  # type: ignore[arg-type]
            if not isinstance(reply, Grant):
                self.refused.append(reply.reason.value)
                return None
            parts.append(reply)
        whole = b"".join(part.body for part in parts)
        return Grant(
            request=ticket.request,
            attempt=ticket.attempt,
            endpoint=parts[0].endpoint,
            body=whole,
            cache_salt=parts[0].cache_salt,
            max_tokens=parts[0].max_tokens,
            adapter=parts[0].adapter,
            options=parts[0].options,
        )

    async def send_frames(self, ticket: Ticket, deltas: Sequence[Delta], gone: Sequence[Gone] = ()) -> None:
        """One message of frames."""
        await self._frames_to(names.out(ticket.ingress), deltas, gone)

    async def _frames_to(self, subject: str, deltas: Sequence[Delta], gone: Sequence[Gone] = ()) -> None:
        self._frames += 1
        frames = Frames(replica=self.id, sequence=self._frames, deltas=tuple(deltas), gone=tuple(gone))
        try:
            await self._bus.publish(subject, encode(frames))
        except BusError:
            return

    def _on_back(self, message: BusMessage) -> None:
        back: Back = decode(message.payload, Back)  # type: ignore[arg-type]
        if isinstance(back, Held):
            self._spawn(self._held(back))
        elif isinstance(back, Cancel):
            run = self._run_of(back.request)
            if run is not None and not run.ended.is_set():
                run.cancelled_by = run.cancelled_by or "cancel"
                run.ended.set()
        elif isinstance(back, Resend):
            run = self._run_of(back.request)
            if run is not None:
                again = [d for _, d in run.sent if d.choice == back.choice and d.first_token_index >= back.from_index]
                self._spawn(self.send_frames(run.ticket, again))

    async def _held(self, held: Held) -> None:
        named = {entry.request: entry for entry in held.entries}
        gone = [
            Gone(request=entry.request, attempt=entry.attempt)
            for entry in held.entries
            if (run := self._run_of(entry.request)) is None or run.cancelled_by
        ]
        again: list[Delta] = []
        for run in self.running:
            if run.ticket.ingress != held.ingress:
                continue
            entry = named.get(run.ticket.request)
            if entry is None:
                run.unnamed += 1
                complete = bool(run.sent) and run.sent[-1][1].end
                if run.unnamed >= 2 or complete:
                    run.cancelled_by = run.cancelled_by or ("" if complete else "unnamed")
                    run.ended.set()
                continue
            run.unnamed = 0
            old_s = time.monotonic() - UNCONFIRMED_S
            again += [
                delta
                for sent_s, delta in run.sent
                if sent_s < old_s and (delta.end or delta.first_token_index >= entry.next_indexes[delta.choice])
            ]
        await self._frames_to(names.out(held.ingress), again, gone)

    def _run_of(self, request: RequestId) -> Run | None:
        return next((run for run in self.runs if run.ticket.request == request), None)

    def _spawn(self, work: Any) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


# ------------------------------------------------------------------------------------------------------------------ pool


class Pool:
    """A gateway with its HTTP server and NATS ingress, on a real nats-server."""

    def __init__(self, nats_url: str, stack: AsyncExitStack) -> None:
        self.nats_url = nats_url
        self._stack = stack
        self.tickets: list[str] = []
        self.telemetry: list[IngressTelemetry] = []
        self._records: list[ModelRecord] = []
        self._replicas: list[ScriptedReplica] = []
        self._digests = 0
        self.gateway: Gateway
        self.app: HttpApp
        self.server: HttpServer
        self.ingress: NatsIngress
        self.bus: NatsBus
        self.http: httpx.AsyncClient

    def openai(self, *, api_key: str = "no-key-needed", **options: Any) -> AsyncOpenAI:
        """A client as users have it, without retries."""
        client = AsyncOpenAI(
            base_url=f"{self.server.url}/v1", api_key=api_key, **({"max_retries": 0, "timeout": WAIT_S} | options)
        )
        self._stack.push_async_callback(client.close)
        return client

    async def register(self, *records: ModelRecord) -> None:
        """Puts models into the registry and waits until the gateway knows them."""
        for one in records:
            await self.bus.kv_put(names.MODELS_BUCKET, one.name, encode(one))
        self._records += records

        def known() -> bool:
            told = [view.record for view, _ in self.gateway.model_states()]
            return all(one in told for one in records)

        await until(known, "the gateway knows the models")

    async def replica(
        self,
        model: ModelRecord,
        script: Script = answer_hello,
        *,
        slots: int = 8,
        classes: Sequence[SlaClass] = (SlaClass.SILVER,),
    ) -> ScriptedReplica:
        """A replica that pulls already."""
        replica = ScriptedReplica(self.bus, model, script, slots=slots, classes=classes)
        await replica.start()
        self._replicas.append(replica)
        return replica

    async def publish_digest(self, *, ready: Sequence[ModelRecord] = (), models: Sequence[PoolModel] = ()) -> None:
        """What the scheduler would say."""
        self._digests += 1
        digest = PoolDigest(
            epoch=1,
            sequence=self._digests,
            models=tuple(models),
            replicas=tuple(
                PoolReplica(
                    replica=ReplicaId(incarnated("listed")),
                    model_hash=one.model_hash,
                    deployment=one.deployment,
                    worker=WorkerId("w-1"),
                    device=DeviceId("cpu0"),
                    state=ReplicaState.READY,
                )
                for one in ready
            ),
        )
        await self.bus.publish(names.POOL, encode(digest))
        await until(lambda: self.gateway.digest == digest, "the gateway has the digest")

    async def chat(self, model: str, **fields: Any) -> httpx.Response:
        """A chat request by plain HTTP."""
        body = {"model": model, "messages": [{"role": "user", "content": "Hi"}]} | fields
        return await self.http.post("/v1/chat/completions", json=body)

    async def clear(self) -> None:
        """Forgets models, replicas and what was seen, so that the next test finds nothing of this one."""
        while self._replicas:
            await self._replicas.pop().stop()
        while self._records:
            await self.bus.kv_delete(names.MODELS_BUCKET, self._records.pop().name)
        await until(lambda: self.gateway.unready_reason() or not self.gateway.model_states(), "the gateway has forgotten")
        self.tickets.clear()
        self.telemetry.clear()


@asynccontextmanager
async def open_pool(
    nats_url: str,
    *,
    gateway: GatewayOptions | None = None,
    http: HttpOptions | None = None,
    keys: ApiKeys | None = None,
    wait_for_bus: bool = True,
) -> AsyncIterator[Pool]:
    """A running pool."""
    async with AsyncExitStack() as stack:
        pool = Pool(nats_url, stack)
        own = await NatsBus.connect(nats_url, name="gateway", wait=True)
        stack.push_async_callback(own.close)
        pool.gateway = Gateway(own, gateway)
        pool.app = HttpApp(pool.gateway, http or HttpOptions(), keys)
        pool.server = HttpServer(pool.app, host="127.0.0.1", port=0)
        pool.ingress = NatsIngress(own, pool.gateway)
        await pool.gateway.start()
        stack.push_async_callback(pool.gateway.stop)
        await pool.ingress.start()
        stack.push_async_callback(pool.ingress.stop)
        await pool.server.start()
        stack.push_async_callback(pool.server.stop)
        pool.http = await stack.enter_async_context(httpx.AsyncClient(base_url=pool.server.url, timeout=WAIT_S))
        pool.bus = await NatsBus.connect(nats_url, name="tests", wait=True)
        stack.push_async_callback(pool.bus.close)
        if wait_for_bus:
            await until(lambda: pool.bus.connected and not pool.gateway.unready_reason(), "the gateway is ready")
            await pool.bus.subscribe(f"{names.PREFIX}.req.>", lambda message: pool.tickets.append(message.subject))
            await pool.bus.subscribe(
                names.ingress_telemetry(pool.gateway.ingress),
                lambda message: pool.telemetry.append(decode(message.payload, IngressTelemetry)),
            )
        stack.push_async_callback(pool.clear)
        yield pool


async def thinks_and_calls(run: Run) -> None:
    """Reasoning, text, and two calls, the second whole in one piece."""
    await run.say("", detail={"reasoning": "Let me "})
    await run.say("", detail={"reasoning": "see."})
    await run.say("I will look.")
    call = {"index": 0, "id": "call-1", "type": "function", "function": {"name": "look", "arguments": ""}}
    await run.say("", detail={"tool_calls": [call]})
    await run.say("", detail={"tool_calls": [{"index": 0, "function": {"arguments": '{"a":'}}]})
    await run.say("", detail={"tool_calls": [{"index": 0, "function": {"arguments": "[1]}"}}]})
    second = {"index": 1, "id": "call-2", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    await run.say("", detail={"tool_calls": [second]})
    await run.end(finish="tool_calls")
