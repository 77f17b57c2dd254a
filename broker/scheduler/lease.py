"""Who leads: one key in the ``carpool-leader`` bucket that its holder writes again before ``LEASE_S`` have passed (SCH-12).

The holder renews with a compare-and-set on its own revision. A standby reads the key and takes it, by compare-and-set too,
when the revision has not moved for ``LEASE_S`` of the standby's own clock. A holder that could not renew for ``LEASE_S``
counts itself out before it acts again. Clocks of two machines are never compared. What this cannot exclude, for example a
holder that is frozen between its check and its command, the epoch does: agents refuse a lower one than they have seen.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

import structlog

from subjects.bus import Bus
from subjects.codec import decode, encode
from subjects.errors import BusError, DecodeError, WrongRevision
from subjects.messages import Lease
from subjects.names import LEADER_BUCKET

LEASE_S = 1.4
"""A standby leads within 2 s of its leader's death: this, one look, and one read and write."""
RENEW_EVERY_S = 0.2
LOOK_EVERY_S = 0.2
CALL_S_MAX = 0.4
"""One write or read of the key. A lease has room for two that fail and one that works, so a slow one costs nothing."""
KEY = "scheduler"

log = structlog.get_logger(__name__)


@dataclass(eq=False, slots=True)
class LeaseKeeper:
    """Campaigns for the lease, holds it, and says when it is gained and lost."""

    _bus: Bus
    _holder: str
    epoch_seen: Callable[[], int]
    on_gained: Callable[[int], None]
    on_lost: Callable[[str], None]
    _revision: int = 0
    epoch: int = 0
    """Of our last leadership."""
    _renewed_s: float = 0.0
    _watched: int = -1
    _watched_since_s: float = 0.0
    _looked_s: float = 0.0
    _failure: str = ""
    """Why the last write or read did not work; empty when it did."""
    holds: bool = False

    def check(self, now_s: float) -> bool:
        """Whether the lease is held at this moment; one that ran out is given up first."""
        if self.holds and now_s - self._renewed_s > LEASE_S:
            self.give_up(f"the lease could not be renewed in time ({self._failure or 'no turn'})")
        return self.holds

    def give_up(self, reason: str) -> None:
        """Leads no more; the key is left to run out."""
        if self.holds:
            self.holds = False
            self._watched = -1
            log.warning("leadership lost", reason=reason, epoch=self.epoch)
            self.on_lost(reason)

    async def run(self) -> None:
        """Campaigns and renews until cancelled."""
        while True:
            try:
                await asyncio.wait_for(self._renew() if self.holds else self._campaign(), CALL_S_MAX)
                self._failure = ""
            except (BusError, TimeoutError) as error:
                # A full disk under the server, say, shows nowhere else.
                failure = str(error) or "no answer"
                if failure != self._failure and not self.holds:
                    log.warning("the lease cannot be read or written", reason=failure)
                self._failure = failure
            self.check(time.monotonic())
            await asyncio.sleep(RENEW_EVERY_S if self.holds else LOOK_EVERY_S)

    async def release(self) -> None:
        """Gives the lease back on shutdown, so that a standby need not wait for it to run out.

        The key stays, with its epoch and nobody as holder: a pool's next leader must not begin the epochs, and with them the
        names of operations that the journal keeps, from one again.
        """
        if self.check(time.monotonic()):
            self.holds = False
            self.on_lost("shutdown")
            with suppress(BusError, TimeoutError):
                free = encode(Lease(holder="", epoch=self.epoch))
                write = self._bus.kv_put(LEADER_BUCKET, KEY, free, expected_revision=self._revision)
                await asyncio.wait_for(write, CALL_S_MAX)

    async def _renew(self) -> None:
        begun_s = time.monotonic()
        value = encode(Lease(holder=self._holder, epoch=self.epoch))
        try:
            self._revision = await self._bus.kv_put(LEADER_BUCKET, KEY, value, expected_revision=self._revision)
        except WrongRevision:
            # It may be our own write whose answer got lost.
            if (entry := await self._bus.kv_get(LEADER_BUCKET, KEY)) is None:
                self.give_up("the lease is gone from the bus")
                return
            if _lease(entry.value).holder != self._holder:
                self.give_up(f"{_lease(entry.value).holder} has taken the lease")
                return
            self._revision = entry.revision
        self._renewed_s = begun_s

    async def _campaign(self) -> None:
        begun_s = time.monotonic()
        entry = await self._bus.kv_get(LEADER_BUCKET, KEY)
        revision = entry.revision if entry is not None else 0
        # A gap in our own looking is no evidence that the holder was silent.
        if revision != self._watched or begun_s - self._looked_s > LEASE_S:
            self._watched, self._watched_since_s = revision, begun_s
        self._looked_s = begun_s
        lease = _lease(entry.value) if entry is not None else Lease(holder="", epoch=0)
        given_back = not lease.holder and lease.epoch > 0
        if entry is not None and not given_back and begun_s - self._watched_since_s <= LEASE_S:
            return
        before = lease.epoch
        self.epoch = max(revision, before, self.epoch, self.epoch_seen()) + 1
        value = encode(Lease(holder=self._holder, epoch=self.epoch))
        try:
            self._revision = await self._bus.kv_put(LEADER_BUCKET, KEY, value, expected_revision=revision)
        except WrongRevision:
            return  # Somebody was faster.
        self._renewed_s = begun_s
        self.holds = True
        log.info("leadership gained", epoch=self.epoch, holder=self._holder)
        self.on_gained(self.epoch)


def _lease(value: bytes) -> Lease:
    try:
        return decode(value, Lease)
    except DecodeError:
        return Lease(holder="", epoch=0)
