"""The task's side of the shared index: leases, batches, what to do when the server lost what it had, sweeping of dead nodes.

One caller at a time; every wait is bounded by the link's write timeout. What may not be written waits in the buffer.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Final

from redis.asyncio import Redis

from kvcache.core.index_buffer import IndexBatch, IndexBuffer, SpanAccess, pack_dropped, pack_noted
from kvcache.shared import scripts
from kvcache.shared.link import LinkSettings, RedisLink, Refusal, refusal_of
from subjects.ids import ModelHash, base_name

Held = tuple[ModelHash, bytes, SpanAccess]
"""A span that the node holds."""
_BATCHES_PER_TURN_MAX: Final = 256
_DROPS_TIMES_NODES_MAX: Final = 32_768
"""Look-ups that dropping a batch may cost the server."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RedisIndexSettings:
    """Bounds."""

    prefix: str = ""
    """Of all keys, for a server that others use too."""
    flush_every_s: float = 0.2
    batch_max: int = 256
    """Entries at a time: the server is busy with them for a millisecond or two, and so long others wait."""
    buffer_max: int = 65_536
    """Entries that wait in this process, about 300 bytes each."""
    read_deadline_s: float = 0.005
    spans_per_read_max: int = 1024
    holders_per_read_max: int = 256
    lease_s: float = 15.0
    """A node that says nothing for so long is dead to the readers."""
    model_ttl_s: float = 3600.0
    """Keys of a model that nobody uses vanish after this."""
    members_max: int = 100_000
    """Of one model: 25 million tokens."""
    members_total_max: int = 400_000
    models_max: int = 64
    nodes_max: int = 256
    members_kept_min: int = 1000
    """Of a model, when the server has no memory left and this index makes room."""
    resync_every_s: float = 30.0
    """Least time from telling everything to telling everything again."""
    sweep_batches_max: int = 64
    """Per turn, that is per ``flush_every_s``."""
    close_s_max: float = 1.0
    link: LinkSettings = field(default_factory=LinkSettings)


@dataclass(slots=True, kw_only=True)
class IndexCounts:
    """Since the start."""

    told: int = 0
    """Entries that the server took."""
    batches: int = 0
    trimmed: int = 0
    """Members that went because of a bound, as answered to this node."""
    mended: int = 0
    """Keys of a wrong type and scores from the future that were removed."""
    skipped_values: int = 0
    """Scores and entries read that can mean nothing."""
    lost: int = 0
    """Times that the server was found without what this node had told it."""
    resyncs: int = 0
    swept: int = 0
    """Entries of dead nodes that were removed."""
    owner_errors: int = 0
    """``on_lost`` failed."""


class IndexKeys:
    """The names of all keys under one prefix; ``redis_scripts`` says what each holds."""

    def __init__(self, prefix: str) -> None:
        self.hotness = f"{prefix}cache:hotness:"
        self.spans = f"{prefix}cache:spans:"
        self.lease = f"{prefix}cache:node:"
        self.nodes = f"{self.spans}nodes"
        self.models = f"{self.spans}models"

    def spans_of(self, model_hash: str, node: str) -> str:
        """What ``node`` says it holds of a model."""
        return f"{self.spans}{model_hash}:{node}"


class IndexWriter:
    """What one node tells the server, and what it does for all: trimming, sweeping."""

    def __init__(
        self,
        link: RedisLink,
        buffer: IndexBuffer,
        node: str,
        settings: RedisIndexSettings,
        *,
        on_lost: Callable[[], Iterable[Held]] | None,
        now_unix_s: Callable[[], float],
    ) -> None:
        self.settings = settings
        self.node = node
        self.counts = IndexCounts()
        self.keys = IndexKeys(settings.prefix)
        self.ahead_s = 0.0
        """The server's clock less ours."""
        self.began = False
        """Whether the server took our first beat."""
        self._worker = base_name(node) or node
        self._mark = f"{secrets.token_hex(8)} {self._worker}"
        """In the list of nodes and in each of our hashes; where it is not, the server lost what we told it."""
        self._link = link
        self._buffer = buffer
        self._on_lost = on_lost
        self._now_unix_s = now_unix_s
        self._told_models: set[str] = set()
        self._run_id = ""
        self._registered = False
        self._lost = False
        self._next_beat_s = 0.0
        self._resync_from_s = 0.0
        self._write_from_s = 0.0
        self._pause_s = 0.0
        self._nodes_seen = 1
        self._to_sweep: list[str] = []
        self._in_turn = False

    @property
    def healthy(self) -> bool:
        """Whether the server knows all that was told, and takes more."""
        return self._link.breaker.closed and self._registered and not self._lost and self._pause_s == 0.0

    @property
    def settled(self) -> bool:
        """Whether the server has all that was noted, and nothing is left to be swept."""
        return not (self._in_turn or len(self._buffer) or self._lost or self._buffer.incomplete or self._to_sweep)

    async def farewell(self) -> None:
        """Tells what waits and gives the lease up."""
        if self._link.breaker.closed and self._registered:
            while len(self._buffer) and await self._flush_once():
                pass
            await self._link.tell(lambda client: client.delete(self.keys.lease + self.node))

    def rest(self, error: Exception) -> None:
        """After a failure that nobody foresaw."""
        self._link.refused(Refusal.BUG, error)
        self._pause(5.0)

    async def turn(self) -> None:
        """All that is to be done now."""
        self._in_turn = True
        try:
            await self._turn()
        finally:
            self._in_turn = False

    async def _turn(self) -> None:
        if not self._link.breaker.closed:
            if not await self._link.probe():
                return
            self._next_beat_s = 0.0  # It may be another server, or the same one without our lease.
        if time.monotonic() < self._write_from_s:
            return
        if not await self._beat_if_due():
            return
        if self._lost or self._buffer.incomplete:
            await self._resync()
        for _ in range(_BATCHES_PER_TURN_MAX):
            if not (len(self._buffer) and await self._beat_if_due() and await self._flush_once()):
                break
        await self._sweep()

    async def _flush_once(self) -> bool:
        """Tells the oldest entries. Returns whether to go on."""
        entries_max = self.settings.batch_max
        batches = self._buffer.take(entries_max)
        try:
            left, refusal = await self._send(batches)
        except BaseException:
            self._buffer.put_back(batches)
            raise
        self._buffer.put_back(left)
        return refusal is None

    async def _send(self, batches: list[IndexBatch]) -> tuple[list[IndexBatch], Refusal | None]:
        """Sends batches in one go. Returns those that were not taken, and why."""
        settings = self.settings
        now_s = self._now_unix_s()
        drops_max = max(16, _DROPS_TIMES_NODES_MAX // self._nodes_seen)
        later = [
            IndexBatch(batch.model_hash, dropped=batch.dropped[drops_max:])
            for batch in batches
            if len(batch.dropped) > drops_max
        ]
        sent = [IndexBatch(batch.model_hash, batch.noted, batch.dropped[:drops_max]) for batch in batches]

        async def work(client: Redis) -> list[Any]:
            pipe = client.pipeline(transaction=False)
            for number, batch in enumerate(sent, 1):
                model = batch.model_hash
                pipe.evalsha(
                    scripts.sha_of(scripts.BATCH),
                    4,
                    self.keys.nodes,
                    self.keys.models,
                    self.keys.hotness + model,
                    self.keys.spans_of(model, self.node),
                    self.node,
                    self._mark,
                    model,
                    pack_noted(batch.noted, now_s),
                    pack_dropped(batch.dropped),
                    int(settings.model_ttl_s * 1000),
                    settings.members_max,
                    settings.members_total_max if number == len(sent) else 0,
                    settings.models_max,
                    self.keys.hotness,
                    self.keys.spans,
                )
            answer: list[Any] = await pipe.execute(raise_on_error=False)
            return answer

        answers, refusal = await self._tell(work)
        if answers is None:
            return [*sent, *later], refusal
        left: list[IndexBatch] = []
        for batch, answer in zip(sent, answers, strict=True):
            if isinstance(answer, Exception):
                refusal = refusal_of(answer)
                self._link.refused(refusal, answer)
                await self._after(refusal)
                left.append(batch)
            elif not self._taken(batch, answer):
                left.append(batch)
                refusal = Refusal.WRONG
        if refusal is None:
            self._pause_s = 0.0
        return [*left, *later], refusal

    def _taken(self, batch: IndexBatch, answer: Sequence[int]) -> bool:
        told, fresh, mended, trimmed, members = answer
        if not told:
            self._registered, self._next_beat_s = False, 0.0
            self._found_lost()
            return False
        self.counts.batches += 1
        self.counts.told += len(batch)
        self.counts.mended += mended
        self.counts.trimmed += trimmed
        if fresh and batch.model_hash in self._told_models:
            self._found_lost()
        if not members or len(self._told_models) > 16 * self.settings.models_max:
            self._told_models.discard(batch.model_hash)
        elif batch.noted:
            self._told_models.add(batch.model_hash)
        return True

    async def _resync(self) -> None:
        """Tells the server all that the node holds, after what it believed of the node is gone."""
        now_s = time.monotonic()
        if now_s < self._resync_from_s:
            return
        if self._on_lost is None:
            self._lost, self._buffer.incomplete = False, False
            return
        self._resync_from_s = now_s + self.settings.resync_every_s
        self._buffer.incomplete = False
        models, refusal = await self._tell(lambda client: client.zrange(self.keys.models, 0, self.settings.models_max))
        if refusal is None and models:
            keys = [self.keys.spans_of(model.decode(errors="replace"), self.node) for model in models]
            _, refusal = await self._tell(lambda client: client.unlink(*keys))
        self._told_models.clear()
        try:
            held = iter(self._on_lost())
            while refusal is None and (some := list(islice(held, self.settings.batch_max))):
                left, refusal = await self._send(_by_model(some))
                if refusal is None and not await self._beat_if_due():
                    refusal = Refusal.AWAY
                self._buffer.put_back(left)
        except Exception as error:  # The owner's generator; it is asked again later.
            self.counts.owner_errors += 1
            self._link.refused(Refusal.BUG, error)
            refusal = Refusal.BUG
        if refusal is None:
            self._lost = False
            self.counts.resyncs += 1
        else:
            self._lost = True
            self._resync_from_s = min(self._resync_from_s, time.monotonic() + 1.0)

    async def _beat_if_due(self) -> bool:
        """Refreshes the lease when it is time. Returns whether the node may write."""
        now_s = time.monotonic()
        if now_s < self._next_beat_s:
            return self._registered
        settings = self.settings
        began_s = self._now_unix_s()
        answer, refusal = await self._script(
            scripts.BEAT,
            (self.keys.nodes, self.keys.models, self.keys.lease + self.node),
            (
                self.node,
                self._mark,
                self._worker,
                int(settings.lease_s * 1000),
                int(settings.model_ttl_s * 1000),
                settings.nodes_max,
                self.keys.lease,
                self.keys.hotness,
                self.keys.spans,
            ),
        )
        if refusal is not None:
            return False
        known, full, seconds, microseconds, nodes, dead, same = answer
        self.ahead_s = seconds + microseconds / 1e6 - (began_s + self._now_unix_s()) / 2
        self._registered = not full
        self._nodes_seen = max(1, nodes)
        if full:
            self._link.refusals["full"] += 1
        elif not known and self.began:
            self._found_lost()
        if not len(self._buffer):
            self._pause_s = 0.0  # Nothing that was refused is left to be told.
        self._next_beat_s = now_s + settings.lease_s / 3
        gone = [name.decode(errors="replace") for name in (*dead, *(() if self.began else same))]
        if not self.began and same:
            # Predecessors of this worker: dead, whatever is left of their leases.
            keys = [self.keys.lease + name.decode(errors="replace") for name in same]
            _, refusal = await self._tell(lambda client: client.unlink(*keys))
            if refusal is not None:
                return self._registered
        self.began = True
        self._to_sweep = sorted({*gone, *self._to_sweep})[: settings.nodes_max]
        await self._look_who_answers()
        return self._registered

    async def _look_who_answers(self) -> None:
        if self._run_id == "-":
            return
        info, refusal = await self._link.tell(lambda client: client.info("server"))
        if refusal is Refusal.WRONG:
            self._run_id = "-"  # Not allowed to look: the marks alone must do.
        elif info is not None:
            run_id = str(info.get("run_id", "-"))
            if self._run_id and run_id != self._run_id:
                # A replica took over: it may lack the last writes though it has our marks.
                self._found_lost()
            self._run_id = run_id

    async def _sweep(self) -> None:
        """Removes what dead nodes left, some batches at a time."""
        budget = self.settings.sweep_batches_max
        while self._to_sweep and budget > 0:
            dead = self._to_sweep[0]
            models, refusal = await self._tell(lambda client: client.zrange(self.keys.models, 0, -1))
            for model in [name.decode(errors="replace") for name in models or ()]:
                cursor = "0"
                while refusal is None and budget > 0:
                    budget -= 1
                    answer, refusal = await self._script(
                        scripts.SWEEP,
                        (
                            self.keys.nodes,
                            self.keys.lease + dead,
                            self.keys.hotness + model,
                            self.keys.spans_of(model, dead),
                        ),
                        (dead, model, cursor, max(16, _DROPS_TIMES_NODES_MAX // 64 // self._nodes_seen), self.keys.spans),
                    )
                    if refusal is None:
                        cursor = answer[0].decode()
                        self.counts.swept += answer[1]
                    if cursor in ("0", "-"):
                        break
                if refusal is not None or budget <= 0:
                    return
            if refusal is not None:
                return
            await self._script(scripts.FORGET, (self.keys.nodes, self.keys.lease + dead), (dead,))
            self._to_sweep.remove(dead)

    # Trouble ----------------------------------------------------------------------------------------------------------

    async def _script(self, script: str, keys: Sequence[str], arguments: Sequence[str | int]) -> tuple[Any, Refusal | None]:
        async def work(client: Redis) -> Any:
            return await client.evalsha(scripts.sha_of(script), len(keys), *keys, *arguments)

        answer, refusal = await self._tell(work)
        if refusal is Refusal.SCRIPT:  # It has them now.
            answer, refusal = await self._tell(work)
        return answer, refusal

    async def _tell(self, work: Callable[[Redis], Any]) -> tuple[Any, Refusal | None]:
        answer, refusal = await self._link.tell(work)
        if refusal is not None:
            await self._after(refusal)
        return answer, refusal

    async def _after(self, refusal: Refusal) -> None:
        """What helps against a refusal, if anything does."""
        if refusal is Refusal.SCRIPT:
            await self._link.tell(_load_scripts)
        elif refusal is Refusal.MEMORY and time.monotonic() >= self._write_from_s:
            self._pause(2.0)
            floor = self.settings.members_kept_min
            await self._script(
                scripts.RELIEVE, (self.keys.nodes, self.keys.models), (floor, self.keys.hotness, self.keys.spans)
            )
        elif refusal in (Refusal.WRONG, Refusal.BUG):
            self._pause(5.0)

    def _pause(self, pause_s_max: float) -> None:
        self._pause_s = min(pause_s_max, max(0.25, self._pause_s * 2))
        self._write_from_s = time.monotonic() + self._pause_s

    def _found_lost(self) -> None:
        if not self._lost:
            self._lost = True
            self.counts.lost += 1


def _by_model(held: Iterable[Held]) -> list[IndexBatch]:
    batches: dict[ModelHash, IndexBatch] = {}
    for model_hash, span, access in held:
        batches.setdefault(model_hash, IndexBatch(model_hash)).noted.append((span, access))
    return list(batches.values())


async def _load_scripts(client: Redis) -> None:
    for script in scripts.ALL:
        await client.script_load(script)
