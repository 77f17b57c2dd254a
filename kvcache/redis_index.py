"""The shared index (L3): which spans were used when, by all nodes, and who holds them, in Redis or Valkey.

Everything here is advice. ``note`` and ``dropped`` put into a bounded buffer and return; one task tells the server in
batches. Questions take milliseconds or are answered with nothing, and then the caller goes by what it knows itself.
``redis_scripts`` says what lies where; ``redis_link`` bounds every wait.

Memory of the server is bounded by counts, not by time: members of a model, members of all models, models, nodes. The coldest
go first, their metadata in the same step. What a node wrote counts while its lease lives; who finds a dead one sweeps it.
A server that lost what it had (restart, FLUSHALL, another server behind the same name) is told all of it again.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from itertools import islice
from typing import Any, Final

import structlog
from redis.asyncio import Redis

from kvcache import redis_scripts as scripts
from kvcache.core.index_buffer import (
    IndexBatch,
    IndexBuffer,
    SpanAccess,
    SpanEntry,
    pack_dropped,
    pack_noted,
    plausible_time,
    unpack_entry,
)
from kvcache.redis_link import LinkSettings, RedisLink, Refusal, refusal_of
from subjects.errors import ConfigError
from subjects.ids import ModelHash, base_name, is_token
from subjects.tasks import end_tasks

log = structlog.get_logger(__name__)

Held = tuple[ModelHash, bytes, SpanAccess]
"""A span that the node holds."""
LOG_EVERY_S: Final = 60.0
_TOLD_REFUSALS: Final = ("away", "bug", "full", "memory", "wrong")
_DROPS_TIMES_NODES_MAX: Final = 32_768
"""Look-ups that dropping a batch may cost the server."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RedisIndexSettings:
    """Bounds."""

    prefix: str = ""
    """Of all keys, for a server that others use too."""
    flush_every_s: float = 0.2
    batch_max: int = 512
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


class IndexState(Enum):
    """Whether the shared hotness may be relied upon."""

    STARTING = "starting"
    OK = "ok"
    DEGRADED = "degraded"
    """The server is gone, frozen, full or refuses: go by what this node knows itself."""


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


@dataclass(frozen=True, slots=True)
class IndexStats:
    """For metrics: state, what waits, counts; ``refusals`` by kind (``Refusal``, ``late``, ``skipped``)."""

    state: IndexState
    address: str
    waiting: int
    overflowed: int
    coalesced: int
    counts: IndexCounts
    refusals: dict[str, int]


@dataclass(frozen=True, slots=True)
class Holder:
    """A living node that says it holds a span."""

    node: str
    entry: SpanEntry


class RedisIndex:
    """One node's part in the index. ``async with RedisIndex(url, node) as index``, or :meth:`start` and :meth:`close`.

    ``node`` is a name plus incarnation; nodes of the same name are one after the other, and the newest removes what its
    predecessors left. ``on_lost`` gives all spans that the node holds; it is asked when the server lost them, runs on the
    event loop, may be a generator and is then resumed batch by batch, so it must stand changes in between.

    Raises:
        ConfigError: the URL, the prefix or the node is not usable. No message quotes the URL.
    """

    def __init__(
        self,
        url: str,
        node: str,
        settings: RedisIndexSettings | None = None,
        *,
        on_lost: Callable[[], Iterable[Held]] | None = None,
        now_unix_s: Callable[[], float] = time.time,
    ) -> None:
        if not is_token(node):
            raise ConfigError("node: use letters, digits, '-' or '_'")
        self.settings = settings or RedisIndexSettings()
        self.node = node
        self.counts = IndexCounts()
        self._worker = base_name(node) or node
        self._mark = f"{secrets.token_hex(8)} {self._worker}"
        """In the list of nodes and in each of our hashes; where it is not, the server lost what we told it."""
        self._link = RedisLink(url, self.settings.link)
        self._buffer = IndexBuffer(self.settings.buffer_max)
        self._on_lost = on_lost
        self._now_unix_s = now_unix_s
        self._ahead_s = 0.0
        """The server's clock less ours."""
        prefix = self.settings.prefix
        self._hotness, self._spans, self._lease = f"{prefix}cache:hotness:", f"{prefix}cache:spans:", f"{prefix}cache:node:"
        self._nodes, self._models = f"{self._spans}nodes", f"{self._spans}models"
        self._told_models: set[str] = set()
        self._run_id = ""
        self._registered = False
        self._first_beat = True
        self._lost = False
        self._next_beat_s = 0.0
        self._resync_from_s = 0.0
        self._write_from_s = 0.0
        self._pause_s = 0.0
        self._nodes_seen = 1
        self._to_sweep: list[str] = []
        self._said_s = float("-inf")
        self._said_of: dict[str, int] = {}
        self._said_state = IndexState.STARTING
        self._task: asyncio.Task[None] | None = None

    # What the node calls ----------------------------------------------------------------------------------------------

    def note(self, model_hash: ModelHash, span: bytes, access: SpanAccess) -> None:
        """The span was used here, or its tier changed. Never waits; when the server is slow the oldest notes are lost."""
        self._buffer.note(model_hash, span, access)

    def dropped(self, model_hash: ModelHash, span: bytes) -> None:
        """The node holds the span no more. Never waits."""
        self._buffer.dropped(model_hash, span)

    @property
    def state(self) -> IndexState:
        """Whether the shared hotness may be relied upon."""
        if self._task is None or (self._first_beat and self._link.breaker.closed and not self._link.refusals):
            return IndexState.STARTING
        healthy = self._link.breaker.closed and self._registered and not self._lost and self._pause_s == 0.0
        return IndexState.OK if healthy else IndexState.DEGRADED

    @property
    def stats(self) -> IndexStats:
        """Counts and state."""
        counts = self._buffer.counts
        return IndexStats(
            self.state,
            self._link.address,
            len(self._buffer),
            counts.overflowed,
            counts.coalesced,
            self.counts,
            dict(self._link.refusals),
        )

    async def last_access(
        self, model_hash: ModelHash, spans: Sequence[bytes], *, deadline_s: float | None = None
    ) -> dict[bytes, float]:
        """When any node used each span last, Unix seconds of this node's clock; spans that are not known are left out.

        Of more than ``spans_per_read_max`` spans the first are answered. Without an answer in time it is empty.
        """
        wanted = list(spans[: self.settings.spans_per_read_max])
        if not wanted:
            return {}
        key, members = self._hotness + model_hash, [span.hex() for span in wanted]

        async def question(client: Redis) -> Sequence[Any]:
            answer: Sequence[Any] = await client.zmscore(key, members)
            return answer

        scores = await self._link.ask(question, self.settings.read_deadline_s if deadline_s is None else deadline_s)
        now_s = self._now_unix_s()
        found: dict[bytes, float] = {}
        for span, score in zip(wanted, scores or (), strict=False):
            if score is None:
                continue
            at_s = float(score) - self._ahead_s
            if plausible_time(at_s, now_s):
                found[span] = at_s
            else:
                self.counts.skipped_values += 1
        return found

    async def holders(
        self, model_hash: ModelHash, spans: Sequence[bytes], *, deadline_s: float | None = None
    ) -> dict[bytes, tuple[Holder, ...]]:
        """Living nodes that hold each span, by name of node, this one too; spans that nobody holds are left out.

        Of more than ``holders_per_read_max`` spans the first are answered. Without an answer in time it is empty.
        """
        wanted = list(spans[: self.settings.holders_per_read_max])
        if not wanted:
            return {}
        arguments = [model_hash, self._lease, self._spans, *(span.hex() for span in wanted)]

        async def question(client: Redis) -> list[Any]:
            answer: list[Any] = await client.evalsha(scripts.sha_of(scripts.HOLDERS), 1, self._nodes, *arguments)
            return answer

        answer = await self._link.ask(question, self.settings.read_deadline_s if deadline_s is None else deadline_s)
        found: dict[bytes, list[Holder]] = {}
        for name, values in zip(*[iter(answer or ())] * 2, strict=False):
            node = name.decode(errors="replace")
            for span, value in zip(wanted, values, strict=False):
                entry = unpack_entry(value) if value is not None else None
                if entry is not None:
                    found.setdefault(span, []).append(Holder(node, entry))
                elif value is not None:
                    self.counts.skipped_values += 1
        return {span: tuple(sorted(holders, key=lambda holder: holder.node)) for span, holders in found.items()}

    # Life -------------------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Starts the task that tells the server; waits for nothing."""
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._run())

    async def close(self) -> None:
        """Tells what waits, gives the lease up, and ends; takes ``close_s_max`` at most, and the connections' own bounds."""
        if self._task is None:
            return
        await end_tasks((self._task,))
        farewell = asyncio.get_running_loop().create_task(self._farewell())
        await asyncio.wait((farewell,), timeout=self.settings.close_s_max)
        await end_tasks((farewell,))
        await self._link.close()
        self._task = None

    async def __aenter__(self) -> RedisIndex:
        self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def _farewell(self) -> None:
        if self._link.breaker.closed and self._registered:
            while len(self._buffer) and await self._flush_once():
                pass
            await self._link.tell(lambda client: client.delete(self._lease + self.node))

    async def _run(self) -> None:
        while True:
            try:
                await self._turn()
            except Exception as error:  # A bug of ours must not end the task; the node goes on without a shared index.
                self._link.refused(Refusal.BUG, error)
                self._pause(5.0)
            self._say()
            await asyncio.sleep(self.settings.flush_every_s)

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
        while len(self._buffer) and await self._beat_if_due() and await self._flush_once():
            pass
        await self._sweep()

    # Telling ----------------------------------------------------------------------------------------------------------

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
                    self._nodes,
                    self._models,
                    self._hotness + model,
                    self._own_spans(model),
                    self.node,
                    self._mark,
                    model,
                    pack_noted(batch.noted, now_s),
                    pack_dropped(batch.dropped),
                    int(settings.model_ttl_s * 1000),
                    settings.members_max,
                    settings.members_total_max if number == len(sent) else 0,
                    settings.models_max,
                    self._hotness,
                    self._spans,
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
        models, refusal = await self._tell(lambda client: client.zrange(self._models, 0, self.settings.models_max))
        if refusal is None and models:
            keys = [self._own_spans(model.decode(errors="replace")) for model in models]
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
            (self._nodes, self._models, self._lease + self.node),
            (
                self.node,
                self._mark,
                self._worker,
                int(settings.lease_s * 1000),
                int(settings.model_ttl_s * 1000),
                settings.nodes_max,
                self._lease,
                self._hotness,
                self._spans,
            ),
        )
        if refusal is not None:
            return False
        known, full, seconds, microseconds, nodes, dead, same = answer
        self._ahead_s = seconds + microseconds / 1e6 - (began_s + self._now_unix_s()) / 2
        self._registered = not full
        self._nodes_seen = max(1, nodes)
        if full:
            self._link.refusals["full"] += 1
        elif not known and not self._first_beat:
            self._found_lost()
        if not len(self._buffer):
            self._pause_s = 0.0  # Nothing that was refused is left to be told.
        self._next_beat_s = now_s + settings.lease_s / 3
        gone = [name.decode(errors="replace") for name in (*dead, *(same if self._first_beat else ()))]
        if self._first_beat and same:
            # Predecessors of this worker: dead, whatever is left of their leases.
            keys = [self._lease + name.decode(errors="replace") for name in same]
            _, refusal = await self._tell(lambda client: client.unlink(*keys))
            if refusal is not None:
                return self._registered
        self._first_beat = False
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
            models, refusal = await self._tell(lambda client: client.zrange(self._models, 0, -1))
            for model in [name.decode(errors="replace") for name in models or ()]:
                cursor = "0"
                while refusal is None and budget > 0:
                    budget -= 1
                    answer, refusal = await self._script(
                        scripts.SWEEP,
                        (self._nodes, self._lease + dead, self._hotness + model, f"{self._spans}{model}:{dead}"),
                        (dead, model, cursor, max(16, _DROPS_TIMES_NODES_MAX // 64 // self._nodes_seen), self._spans),
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
            await self._script(scripts.FORGET, (self._nodes, self._lease + dead), (dead,))
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
            await self._script(scripts.RELIEVE, (self._nodes, self._models), (floor, self._hotness, self._spans))
        elif refusal in (Refusal.WRONG, Refusal.BUG):
            self._pause(5.0)

    def _pause(self, pause_s_max: float) -> None:
        self._pause_s = min(pause_s_max, max(0.25, self._pause_s * 2))
        self._write_from_s = time.monotonic() + self._pause_s

    def _found_lost(self) -> None:
        if not self._lost:
            self._lost = True
            self.counts.lost += 1

    def _own_spans(self, model_hash: str) -> str:
        return f"{self._spans}{model_hash}:{self.node}"

    def _say(self) -> None:
        """One line a minute at most, when something was wrong or is right again."""
        now_s = time.monotonic()
        if now_s - self._said_s < LOG_EVERY_S:
            return
        state = self.state
        counts = {
            **{kind: count for kind, count in sorted(self._link.refusals.items()) if kind in _TOLD_REFUSALS},
            "lost": self.counts.lost,
            "mended": self.counts.mended,
            "skipped_values": self.counts.skipped_values,
            "overflowed": self._buffer.counts.overflowed,
        }
        news = {
            kind: count - self._said_of.get(kind, 0) for kind, count in counts.items() if count > self._said_of.get(kind, 0)
        }
        if not news and state in (self._said_state, IndexState.STARTING):
            return
        if news or self._said_state is IndexState.DEGRADED:
            say = log.info if state is IndexState.OK and not news else log.warning
            say("shared hotness", state=state.value, server=self._link.address, error=self._link.last_error, **news)
            self._said_s = now_s
        self._said_of, self._said_state = counts, state


def _by_model(held: Iterable[Held]) -> list[IndexBatch]:
    batches: dict[ModelHash, IndexBatch] = {}
    for model_hash, span, access in held:
        batches.setdefault(model_hash, IndexBatch(model_hash)).noted.append((span, access))
    return list(batches.values())


async def _load_scripts(client: Redis) -> None:
    for script in scripts.ALL:
        await client.script_load(script)
