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
import time
from collections.abc import Callable, Iterable, Sequence
from enum import Enum
from typing import Any, Final

import msgspec
import structlog
from redis.asyncio import Redis
from redis.exceptions import InvalidResponse

from kvcache.core.index_buffer import IndexBuffer, SpanAccess, SpanEntry, plausible_time, unpack_entry
from kvcache.shared import scripts
from kvcache.shared.link import LinkSettings, RedisLink
from kvcache.shared.writer import Held, IndexCounts, IndexWriter, RedisIndexSettings
from subjects.errors import ConfigError
from subjects.ids import ModelHash, is_token
from subjects.tasks import end_tasks

__all__ = [
    "Held",
    "Holder",
    "IndexCounts",
    "IndexState",
    "IndexStats",
    "LinkSettings",
    "RedisIndex",
    "RedisIndexSettings",
    "SpanAccess",
    "SpanEntry",
]

log = structlog.get_logger(__name__)

LOG_EVERY_S: Final = 60.0
_TOLD_REFUSALS: Final = ("away", "bug", "full", "memory", "wrong")


class IndexState(Enum):
    """Whether the shared hotness may be relied upon."""

    STARTING = "starting"
    OK = "ok"
    DEGRADED = "degraded"
    """The server is gone, frozen, full or refuses: go by what this node knows itself."""


class IndexStats(msgspec.Struct, frozen=True):
    """For metrics: state, what waits, counts; ``refusals`` by kind (``Refusal``, ``late``, ``skipped``)."""

    state: IndexState
    address: str
    waiting: int
    overflowed: int
    coalesced: int
    counts: IndexCounts
    refusals: dict[str, int]


class Holder(msgspec.Struct, frozen=True):
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
        self._link = RedisLink(url, self.settings.link)
        self._buffer = IndexBuffer(self.settings.buffer_max)
        self._now_unix_s = now_unix_s
        self._writer = IndexWriter(self._link, self._buffer, node, self.settings, on_lost=on_lost, now_unix_s=now_unix_s)
        self._keys = self._writer.keys
        self.counts = self._writer.counts
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
        if self._writer.healthy:
            return IndexState.OK
        untried = (
            self._link.breaker.closed and not self._writer.began and not self._link.refusals.keys() & set(_TOLD_REFUSALS)
        )
        return IndexState.STARTING if untried else IndexState.DEGRADED

    @property
    def settled(self) -> bool:
        """Whether the server has all that was noted."""
        return self._writer.settled

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

    def hotness_key(self, model_hash: ModelHash) -> str:
        """The sorted set of a model, for whoever looks into the server."""
        return self._keys.hotness + model_hash

    def spans_key(self, model_hash: ModelHash) -> str:
        """The hash of what this node says it holds of a model."""
        return self._keys.spans_of(model_hash, self.node)

    async def last_access(
        self, model_hash: ModelHash, spans: Sequence[bytes], *, deadline_s: float | None = None
    ) -> dict[bytes, float]:
        """When any node used each span last, Unix seconds of this node's clock; spans that are not known are left out.

        Of more than ``spans_per_read_max`` spans the first are answered. Without an answer in time it is empty.
        """
        wanted = list(spans[: self.settings.spans_per_read_max])
        if not wanted:
            return {}
        key, members = self.hotness_key(model_hash), [span.hex() for span in wanted]

        async def question(client: Redis) -> Sequence[float | None]:
            answer: Any = await client.zmscore(key, members)
            if not isinstance(answer, list) or len(answer) != len(members):
                raise InvalidResponse("not one score per member")
            return [None if score is None else float(score) for score in answer]

        scores = await self._link.ask(question, self.settings.read_deadline_s if deadline_s is None else deadline_s)
        now_s = self._now_unix_s()
        found: dict[bytes, float] = {}
        for span, score in zip(wanted, scores or (), strict=False):
            if score is None:
                continue
            at_s = score - self._writer.ahead_s
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
        arguments = [model_hash, self._keys.lease, self._keys.spans, *(span.hex() for span in wanted)]

        async def question(client: Redis) -> list[tuple[bytes, list[bytes | None]]]:
            answer: Any = await client.evalsha(scripts.sha_of(scripts.HOLDERS), 1, self._keys.nodes, *arguments)
            if not isinstance(answer, list):
                raise InvalidResponse("not a list")
            pairs = list(zip(*[iter(answer)] * 2, strict=True))
            if not all(isinstance(values, list) and len(values) == len(wanted) for _, values in pairs):
                raise InvalidResponse("not one value per span")
            return pairs

        answer = await self._link.ask(question, self.settings.read_deadline_s if deadline_s is None else deadline_s)
        found: dict[bytes, list[Holder]] = {}
        for name, values in answer or ():
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
        farewell = asyncio.get_running_loop().create_task(self._writer.farewell())
        await asyncio.wait((farewell,), timeout=self.settings.close_s_max)
        await end_tasks((farewell,))
        await self._link.close()
        self._task = None

    async def __aenter__(self) -> RedisIndex:
        self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def _run(self) -> None:
        while True:
            try:
                await self._writer.turn()
            except Exception as error:  # A bug of ours must not end the task; the node goes on without a shared index.
                self._writer.rest(error)
            self._say()
            await asyncio.sleep(self.settings.flush_every_s)

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
            if news:
                log.warning(
                    "shared hotness", state=state.value, server=self._link.address, error=self._link.last_error, **news
                )
            else:
                log.info("shared hotness", state=state.value, server=self._link.address)
            self._said_s = now_s
        self._said_of, self._said_state = counts, state
