"""What tests of prefix affinity add to a gateway's pool: replicas that take hands, and nodes that tell what they hold."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import Any

from kvcache.core.identity import spans_of
from profiles.blocks import chain_hashes, tenant_salt
from profiles.tokenizer import Tokenizers
from subjects import names
from subjects.bus import BusMessage, Subscription
from subjects.codec import decode, encode
from subjects.errors import BusError
from subjects.ids import DeviceId, ReplicaId, WorkerId
from subjects.messages import (
    Delta,
    Endpoint,
    Frames,
    Gone,
    Hand,
    KvAsk,
    KvIndexed,
    KvModelSpans,
    KvSnapshot,
    KvSpan,
    KvTier,
    ModelRecord,
    PoolDigest,
    PoolReplica,
    ReplicaState,
    Room,
    Ticket,
)
from subjects.nats.bus import NatsBus
from tests.waiting import until
from tests.wire.gateway_pool import Pool, Run, Script, ScriptedReplica


class HandedReplica(ScriptedReplica):
    """Tells its room with each message of frames, and takes what it is handed."""

    def __init__(self, bus: NatsBus, model: ModelRecord, script: Script, *, slots: int, **options: Any) -> None:
        super().__init__(bus, model, script, slots=slots, **options)
        self.hands: list[Hand] = []

    @property
    def slots(self) -> int:
        """What it would take more."""
        return self._free

    @slots.setter
    def slots(self, slots: int) -> None:
        self._free = slots

    async def start(self) -> None:
        """Begins to pull and to take hands."""
        hands = await self._bus.subscribe(names.run(self.id), self._on_hand)
        self._stack.push_async_callback(hands.stop)
        await super().start()

    def _on_hand(self, message: BusMessage) -> None:
        hand = decode(message.payload, Hand)
        self.hands.append(hand)
        self._free -= 1
        self._spawn(self._run(hand))

    async def _run(self, hand: Hand) -> None:
        grant = hand.grant
        ticket = Ticket(
            request=grant.request, attempt=grant.attempt, publication=0, ingress=hand.ingress, profile=hand.profile
        )
        run = Run(self, ticket, grant, json.loads(grant.body))
        self.runs.append(run)
        try:
            await self.script(run)
            await run.ended.wait()
        finally:
            self._free += 1

    async def _frames_to(self, subject: str, deltas: Sequence[Delta], gone: Sequence[Gone] = ()) -> None:
        self._frames += 1
        seen = self.hands[-1].number if self.hands else 0
        room = Room(hands=seen, slots=max(0, self._free), pages=1 << 20, tokens=1 << 20)
        frames = Frames(replica=self.id, sequence=self._frames, deltas=tuple(deltas), gone=tuple(gone), room=room)
        try:
            await self._bus.publish(subject, encode(frames))
        except BusError:
            return


class ScriptedNode:
    """A worker's node as others hear it: what it holds is a dictionary of span to tier and engine."""

    def __init__(self, bus: NatsBus, worker: WorkerId, model: ModelRecord, name: str = "node-1") -> None:
        self.worker = worker
        self.model = model
        self.name = name
        self.sequence = 0
        self.holds: dict[bytes, KvSpan] = {}
        self.asked: list[KvAsk] = []
        self.page_spans = 2
        self._bus = bus
        self._subscription: Subscription | None = None

    async def start(self) -> ScriptedNode:
        """Answers ``KvAsk``."""
        self._subscription = await self._bus.subscribe(names.kv_ask(self.worker), self._on_ask)
        return self

    async def stop(self) -> None:
        """Dies."""
        if self._subscription is not None:
            await self._subscription.stop()

    async def say(
        self, gained: Sequence[bytes] = (), replica: ReplicaId | None = None, *, emptied: Sequence[ReplicaId] = ()
    ) -> None:
        """A batch; without anything it is a beat."""
        spans = [
            KvSpan(span=span, depth=8 * (depth + 1), tier=KvTier.HOST, replica=replica) for depth, span in enumerate(gained)
        ]
        self.holds |= {one.span: one for one in spans}
        self.sequence += 1
        models = (self._spans(spans),) if spans else ()
        news = KvIndexed(worker=self.worker, node=self.name, sequence=self.sequence, models=models, emptied=tuple(emptied))
        await self._bus.publish(names.kv_index(self.worker), encode(news))

    def _spans(self, spans: Sequence[KvSpan]) -> KvModelSpans:
        return KvModelSpans(model_hash=self.model.model_hash, block_size=self.model.block_size, held=tuple(spans))

    def _on_ask(self, message: BusMessage) -> None:
        ask = decode(message.payload, KvAsk)
        self.asked.append(ask)
        first = int(ask.cursor or b"0")
        page = list(self.holds.values())[first : first + self.page_spans]
        after = first + self.page_spans
        cursor = str(after).encode() if after < len(self.holds) else b""
        models = (self._spans(page),) if page else ()
        snapshot = KvSnapshot(worker=self.worker, node=self.name, sequence=self.sequence, models=models, cursor=cursor)
        asyncio.ensure_future(self._bus.publish(message.reply, encode(snapshot)))  # noqa: RUF006


def hashes_for(model: ModelRecord, content: str, domain: str = "default") -> list[bytes]:
    """The block hashes of a chat with one message, as gateway, replica and node make them."""
    body = {"model": model.name, "messages": [{"role": "user", "content": content}]}
    (prompt,) = Tokenizers().get(model).prompts(Endpoint.CHAT, body)
    return chain_hashes(prompt, model.block_size, tenant_salt(domain))


def spans_for(model: ModelRecord, content: str, domain: str = "default") -> list[bytes]:
    """Its spans."""
    return spans_of(hashes_for(model, content, domain), model.block_size)


async def tell_pool(pool: Pool, *places: tuple[ReplicaId, WorkerId], model: ModelRecord) -> None:
    """The scheduler's digest: these replicas are ready at these workers."""
    digest = PoolDigest(
        epoch=1,
        sequence=1000 + len(places),
        replicas=tuple(
            PoolReplica(
                replica=replica,
                model_hash=model.model_hash,
                deployment=model.deployment,
                worker=worker,
                device=DeviceId("cpu0"),
                state=ReplicaState.READY,
            )
            for replica, worker in places
        ),
    )
    await pool.bus.publish(names.POOL, encode(digest))
    await until(lambda: pool.gateway.digest == digest, "the gateway has the digest")
