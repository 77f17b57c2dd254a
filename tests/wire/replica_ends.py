"""The other two ends of a replica, scripted: a gateway on the bus, and an agent on the control socket."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from profiles.deployment import with_deployment
from subjects import names
from subjects.bus import Bus, BusMessage
from subjects.codec import decode, encode
from subjects.errors import BusError
from subjects.ids import DeviceId, IngressId, ModelHash, ReplicaId, RequestId, Tenant, WorkerId, incarnated, model_key
from subjects.messages import (
    Back,
    Cancel,
    Claim,
    Delta,
    Endpoint,
    EngineType,
    Frames,
    Gone,
    Grant,
    Hand,
    Held,
    HeldEntry,
    Lane,
    ModelRecord,
    Refusal,
    RefusalReason,
    RequestProfile,
    Resend,
    SlaClass,
    Ticket,
)
from subjects.tasks import end_tasks
from tests.waiting import until
from workers.control import agent_stream, control_pair
from workers.control_messages import (
    Load,
    Start,
    ToAgent,
    ToReplica,
)
from workers.spec import ReplicaSpec

ROOT = Path(__file__).resolve().parents[2]
HELD_EVERY_S = 0.2
PART_BYTES = 256 * 1024
MODEL_HASHES = iter(f"{number:064x}" for number in range(0xA0, 0xFFF))
"""Each test uses a model of its own, so that tickets of one never reach the replica of another."""

T = TypeVar("T")


def simulated_record(**options: str | int | float | bool) -> ModelRecord:
    """A model on the simulated engine that makes a token of each running request in about 5 ms."""
    timing: dict[str, str | int | float | bool] = {
        "prefill_token_s": 0.0,
        "prefill_token2_s": 0.0,
        "chunk_tokens": 1_000_000,
        "step_const_s": 0.004,
        "step_request_s": 0.0,
        "step_context_token_s": 0.0,
        "kv_pages": 4096,
    }
    record = ModelRecord(
        name="sim",
        model_hash=ModelHash(next(MODEL_HASHES)),
        weights_hash="",
        engine_type=EngineType.SIMULATED,
        source="",
        weights_bytes=0,
        kv_bytes_per_token=0,
        kv_bytes=0,
        budget_bytes=1,
        max_context_len=400_000,
        engine_options={**timing, **options},
    )
    return with_deployment(record)


@dataclass(slots=True)
class Answer:
    """A request as its gateway knows it."""

    body: bytes
    profile: RequestProfile
    attempt: int = 1
    holder: ReplicaId | None = None
    granted: int = 0
    sent_token_ids: tuple[int, ...] = ()
    next_indexes: list[int] = field(default_factory=lambda: [0])
    confirmed: tuple[int, ...] = (0,)
    deltas: list[Delta] = field(default_factory=list)
    repeats: int = 0
    end: Delta | None = None
    named: bool = True
    """Whether ``Held`` still names it."""

    @property
    def text(self) -> str:
        """What the client has."""
        return "".join(delta.text for delta in self.deltas)


class ScriptedGateway:
    """Publishes tickets, answers claims, says ``Held`` five times a second, and takes frames in order."""

    def __init__(self, bus: Bus, record: ModelRecord) -> None:
        self.bus = bus
        self.record = record
        self.ingress = IngressId(incarnated("gateway"))
        self.answers: dict[RequestId, Answer] = {}
        self.claims: list[Claim] = []
        self.frames: list[Frames] = []
        self.gone: list[Gone] = []
        self.drop_frames: Callable[[Frames], bool] = lambda _: False
        self.says_held = True
        self.confirms = True
        """Whether ``Held`` moves on with what arrived."""
        self.asks_resend = True
        self._replicas: list[ReplicaId] = []
        self._held_sequence = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self._numbers = 0

    async def start(self) -> ScriptedGateway:
        """Subscribes and begins to say ``Held``."""
        await self.bus.ensure_queue()
        await self.bus.subscribe(names.claim(self.ingress), self._claimed)
        await self.bus.subscribe(names.out(self.ingress), self._framed)
        self._spawn(self._say_held())
        return self

    async def stop(self) -> None:
        """Ends its tasks; the bus stays."""
        await end_tasks(self._tasks)

    # ---- requests

    def new(
        self, *, tokens: int = 8, content: str = "hi", n: int = 1, lane: Lane = Lane.SMALL, **script: object
    ) -> tuple[RequestId, Answer]:
        """A chat request that was not published yet."""
        self._numbers += 1
        request = RequestId(f"{self.ingress}-{self._numbers}")
        body = json.dumps(
            {"messages": [{"role": "user", "content": content}], "max_tokens": tokens, "n": n, "carpool_sim": script}
        ).encode()
        profile = RequestProfile(
            model_hash=self.record.model_hash,
            deployment=self.record.deployment,
            endpoint=Endpoint.CHAT,
            stream=True,
            tenant=Tenant("test"),
            lane=lane,
            max_tokens=tokens,
            n=n,
            input_tokens=len(content) // 4 + 4,
            expected_output_tokens=tokens,
            kv_pages_needed=max(1, (len(content) // 4 + tokens) // self.record.block_size),
            deadline_unix_s=4e9,
        )
        answer = Answer(body=body, profile=profile, next_indexes=[0] * n, confirmed=(0,) * n)
        self.answers[request] = answer
        return request, answer

    def ticket(self, request: RequestId, publication: int = 1) -> Ticket:
        """The ticket of a request."""
        answer = self.answers[request]
        return Ticket(
            request=request, attempt=answer.attempt, publication=publication, ingress=self.ingress, profile=answer.profile
        )

    async def publish(self, request: RequestId, publication: int = 1) -> None:
        """Puts the ticket on the work-queue."""
        profile = self.answers[request].profile
        await self.bus.queue_publish(
            model_key(profile.deployment),
            SlaClass.SILVER,
            profile.lane,
            encode(self.ticket(request, publication)),
            message_id=f"{request}.{self.answers[request].attempt}.{publication}",
            ttl_s=60,
        )

    async def submit(self, **fields: Any) -> tuple[RequestId, Answer]:
        """A new request, published."""
        request, answer = self.new(**fields)
        await self.publish(request)
        return request, answer

    async def cancel(self, request: RequestId) -> None:
        """Tells the holder to stop, and names the request no more."""
        answer = self.answers[request]
        answer.named = False
        assert answer.holder is not None
        await self._back(answer.holder, Cancel(ingress=self.ingress, request=request, attempt=answer.attempt))

    # ---- wire

    def _spawn(self, coroutine: Any) -> None:
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _back(self, replica: ReplicaId, back: Back) -> None:
        with contextlib.suppress(BusError):  # while the bus is away; Held comes again
            await self.bus.publish(names.back(replica), encode(back))

    def _claimed(self, message: BusMessage) -> None:
        claim = decode(message.payload, Claim)
        self.claims.append(claim)
        self._spawn(self.bus.publish(message.reply, encode(self._judge(claim))))

    def hand(self, request: RequestId, number: int) -> Hand:
        """What hands the request over; whoever gets it is its holder."""
        ticket, answer = self.ticket(request), self.answers[request]
        grant = Grant(request=request, attempt=1, body=answer.body, max_tokens=answer.profile.max_tokens)
        return Hand(number=number, ingress=ticket.ingress, profile=ticket.profile, grant=grant)

    def _judge(self, claim: Claim) -> Grant | Refusal:
        answer = self.answers.get(claim.request)
        refusal = RefusalReason.UNKNOWN if answer is None else None
        if answer is not None and answer.holder not in (None, claim.replica):
            refusal = RefusalReason.TAKEN
        if answer is None or refusal is not None:
            return Refusal(request=claim.request, attempt=claim.attempt, reason=refusal or RefusalReason.UNKNOWN)
        answer.holder = claim.replica
        answer.granted += 1
        if claim.replica not in self._replicas:
            self._replicas.append(claim.replica)
        parts = max(1, -(-len(answer.body) // PART_BYTES))
        return Grant(
            request=claim.request,
            attempt=claim.attempt,
            part=claim.part,
            parts=parts,
            body=answer.body[claim.part * PART_BYTES : (claim.part + 1) * PART_BYTES],
            sent_token_ids=answer.sent_token_ids,
            max_tokens=answer.profile.max_tokens,
        )

    def _framed(self, message: BusMessage) -> None:
        frames = decode(message.payload, Frames)
        if self.drop_frames(frames):
            return
        self.frames.append(frames)
        self.gone += frames.gone
        for delta in frames.deltas:
            self._take(frames.replica, delta)

    def _take(self, replica: ReplicaId, delta: Delta) -> None:
        answer = self.answers.get(delta.request)
        if answer is None or answer.attempt != delta.attempt or answer.end is not None:
            return
        wanted = answer.next_indexes[delta.choice]
        if delta.first_token_index < wanted:
            answer.repeats += 1
        elif delta.first_token_index > wanted:
            if self.asks_resend:
                resend = Resend(
                    ingress=self.ingress,
                    request=delta.request,
                    attempt=delta.attempt,
                    choice=delta.choice,
                    from_index=wanted,
                )
                self._spawn(self._back(replica, resend))
        else:
            answer.next_indexes[delta.choice] += delta.units
            answer.deltas.append(delta)
            if delta.end:
                answer.end = delta

    async def _say_held(self) -> None:
        while True:
            for replica in self._replicas if self.says_held else ():
                self._held_sequence += 1
                entries = tuple(
                    entry for request, answer in self.answers.items() if (entry := self._entry(request, answer, replica))
                )
                held = Held(ingress=self.ingress, sequence=self._held_sequence, entries=entries)
                await self._back(replica, held)
            await asyncio.sleep(HELD_EVERY_S)

    def _entry(self, request: RequestId, answer: Answer, replica: ReplicaId) -> HeldEntry | None:
        if self.confirms:
            answer.confirmed = tuple(answer.next_indexes)
            answer.named = answer.named and answer.end is None
        if answer.holder != replica or not answer.named:
            return None
        return HeldEntry(request=request, attempt=answer.attempt, next_indexes=answer.confirmed)


class AgentEnd:
    """Starts a real replica process and holds the other end of its control socket."""

    def __init__(self, record: ModelRecord, nats_url: str, **fields: Any) -> None:
        self.spec = ReplicaSpec(
            replica=ReplicaId(incarnated("replica")),
            worker=WorkerId(incarnated("worker")),
            device=DeviceId("cpu0"),
            record=record,
            nats_urls=(nats_url,),
            **fields,
        )
        self.heard: list[ToAgent] = []
        self.stderr = b""
        self._process: asyncio.subprocess.Process | None = None
        self._socket: socket.socket | None = None
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> AgentEnd:
        """Starts the process and sends its spec; returns at once."""
        mine, theirs = control_pair()
        with theirs:
            self._process = await asyncio.create_subprocess_exec(
                sys.executable,
                *("-m", "workers.replica", "--control-fd", str(theirs.fileno())),
                pass_fds=(theirs.fileno(),),
                stderr=asyncio.subprocess.PIPE,
                cwd=ROOT,
                start_new_session=True,
            )
        self._socket = mine
        self._stream = await agent_stream(mine)
        self._stream.send(Start(spec=self.spec))
        loop = asyncio.get_running_loop()
        self._tasks = [loop.create_task(self._listen()), loop.create_task(self._read_stderr())]
        return self

    @property
    def pid(self) -> int:
        """Of the replica process."""
        assert self._process is not None
        return self._process.pid

    @property
    def load(self) -> Load | None:
        """The last load report."""
        return next((message for message in reversed(self.heard) if isinstance(message, Load)), None)

    def send(self, message: ToReplica) -> None:
        """Says something to the replica."""
        assert self._stream.send(message)

    async def wait_for(self, kind: type[T], *, within_s: float = 15.0) -> T:
        """The last message of ``kind``, as soon as there is one."""
        await until(lambda: any(isinstance(message, kind) for message in self.heard), within_s=within_s)
        return [message for message in self.heard if isinstance(message, kind)][-1]

    async def exit_code(self, *, within_s: float = 10.0) -> int:
        """Waits for the end of the process."""
        assert self._process is not None
        return await asyncio.wait_for(self._process.wait(), within_s)

    def die(self) -> None:
        """Closes this end as the kernel does when an agent is killed."""
        assert self._socket is not None
        self._stream._writer.transport.abort()

    async def stop(self) -> None:
        """Ends the process, whatever state it is in."""
        if self._process is not None and self._process.returncode is None:
            os.kill(self._process.pid, 9)
            await self._process.wait()
        await end_tasks(self._tasks)
        await self._stream.close()

    async def _listen(self) -> None:
        while (message := await self._stream.receive()) is not None:
            self.heard.append(message)

    async def _read_stderr(self) -> None:
        assert self._process is not None and self._process.stderr is not None
        while chunk := await self._process.stderr.read(65536):
            self.stderr += chunk
