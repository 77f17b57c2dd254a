"""What the bus promises, on a real nats-server."""

from __future__ import annotations

import asyncio
import itertools
from contextlib import suppress

import pytest

from subjects.bus import Bus, BusMessage, KvEntry, Puller, QueuedTicket, Stored
from subjects.errors import (
    BusError,
    BusUnavailable,
    NoResponders,
    PayloadTooLarge,
    QueueFull,
    QueueMissing,
    RequestTimeout,
    WrongRevision,
)
from subjects.ids import ModelKey
from subjects.messages import Lane, SlaClass
from tests.contract.conftest import LIMITS, Backend
from tests.waiting import until

MODEL = ModelKey("0123456789abcdef")
OTHER_MODEL = ModelKey("0123456789abcdee")
TTL_S = 60


class Lines:
    """A puller of one lane with everything it was told."""

    def __init__(self) -> None:
        self.tickets: list[QueuedTicket] = []
        self.returned: list[int] = []

    async def open(self, bus: Bus, model: ModelKey = MODEL, lane: Lane = Lane.SMALL) -> Puller:
        """Opens it."""
        return await bus.open_puller(
            model, SlaClass.GOLD, lane, on_ticket=self.tickets.append, on_expired=self.returned.append
        )

    @property
    def payloads(self) -> list[bytes]:
        """Of the tickets, in order of arrival."""
        return [ticket.payload for ticket in self.tickets]


async def put(bus: Bus, text: str, *, model: ModelKey = MODEL, lane: Lane = Lane.SMALL, ttl_s: int = TTL_S) -> Stored:
    """Stores a ticket whose id is its text."""
    return await bus.queue_publish(model, SlaClass.GOLD, lane, text.encode(), message_id=text, ttl_s=ttl_s)


# ------------------------------------------------------------------------------------------------------- core messages


async def test_published_messages_reach_matching_subscribers_in_order(backend: Backend, bus: Bus) -> None:
    """Wildcards match as NATS does, and one subscriber sees one publisher's order."""
    other = await backend.connect()
    star: list[BusMessage] = []
    rest: list[str] = []
    await bus.subscribe("a.*.c", star.append)
    await bus.subscribe("a.>", lambda message: rest.append(message.subject))
    await bus.round_trip(timeout_s=5)
    for index in range(100):
        await other.publish("a.b.c", b"%d" % index)
    await other.publish("a.b", b"")
    await other.publish("b.b.c", b"")
    await until(lambda: len(rest) == 101)
    assert star == [BusMessage("a.b.c", b"%d" % index) for index in range(100)]
    assert rest == ["a.b.c"] * 100 + ["a.b"]


async def test_posted_messages_keep_their_order_among_published_ones(backend: Backend, bus: Bus) -> None:
    """A post waits for the end of its turn of the loop, and nothing overtakes it."""
    other = await backend.connect()
    heard: list[BusMessage] = []
    await bus.subscribe("a.b", heard.append)
    await bus.round_trip(timeout_s=5)
    for index in range(100):
        if index % 3:
            other.post("a.b", b"%d" % index, reply="a.c" if index % 2 else "")
        else:
            await other.publish("a.b", b"%d" % index)
    await until(lambda: len(heard) == 100)
    replies = ["a.c" if index % 2 and index % 3 else "" for index in range(100)]
    assert heard == [BusMessage("a.b", b"%d" % index, reply) for index, reply in enumerate(replies)]


async def test_a_post_that_nobody_hears_comes_back(bus: Bus) -> None:
    """Only with a reply subject, and at once: who posted need not wait for a silence to mean something."""
    back: list[BusMessage] = []
    await bus.subscribe("back.*", back.append)
    await bus.round_trip(timeout_s=5)
    bus.post("nobody.here", b"1")
    bus.post("nobody.here", b"2", reply="back.2")
    await until(lambda: len(back) == 1)
    assert back == [BusMessage("back.2", b"", undelivered=True)]


async def test_what_cannot_be_posted_is_said_at_once(bus: Bus) -> None:
    """Too large, or not connected any more."""
    with pytest.raises(PayloadTooLarge):
        bus.post("s", bytes(bus.payload_bytes_max + 1))
    await bus.close()
    with pytest.raises(BusUnavailable):
        bus.post("s", b"")


async def test_of_a_group_one_member_gets_each_message(backend: Backend, bus: Bus) -> None:
    """A group shares the messages; a plain subscriber beside it still gets all."""
    seen: list[list[bytes]] = [[], [], []]
    for index, group in enumerate(("g", "g", "")):
        await (await backend.connect()).subscribe("work", lambda m, i=index: seen[i].append(m.payload), group=group)  # type: ignore[misc]
    for one in backend.buses:
        await one.round_trip(timeout_s=5)
    sent = [b"%d" % index for index in range(60)]
    for payload in sent:
        await bus.publish("work", payload)
    await until(lambda: len(seen[2]) == 60 and len(seen[0]) + len(seen[1]) == 60)
    assert seen[2] == sent
    assert sorted(seen[0] + seen[1]) == sorted(sent)
    assert seen[0] and seen[1]


async def test_a_stopped_subscription_is_silent(bus: Bus) -> None:
    """Stopping twice is harmless, and nothing arrives after it."""
    seen: list[bytes] = []
    subscription = await bus.subscribe("s", lambda message: seen.append(message.payload))
    await bus.publish("s", b"1")
    await until(lambda: seen == [b"1"])
    await subscription.stop()
    await subscription.stop()
    await bus.publish("s", b"2")
    await bus.round_trip(timeout_s=5)
    await asyncio.sleep(0.05)
    assert seen == [b"1"]


async def test_a_failing_handler_harms_nobody(bus: Bus) -> None:
    """The error is logged and the next message is handled."""
    seen: list[bytes] = []

    def handler(message: BusMessage) -> None:
        seen.append(message.payload)
        if message.payload == b"bad":
            raise ValueError("on purpose")

    await bus.subscribe("s", handler)
    for payload in (b"1", b"bad", b"2"):
        await bus.publish("s", payload)
    await until(lambda: len(seen) == 3)
    assert seen == [b"1", b"bad", b"2"]
    assert await bus.round_trip(timeout_s=5) >= 0


def answer(bus: Bus, message: BusMessage, tasks: list[asyncio.Task[None]]) -> None:
    """Replies with the payload twice over, if it is not empty."""
    if message.payload:
        tasks.append(asyncio.get_running_loop().create_task(bus.publish(message.reply, message.payload * 2)))


async def test_requests_get_their_own_replies(backend: Backend, bus: Bus) -> None:
    """Many requests at once on one connection are told apart."""
    other = await backend.connect()
    tasks: list[asyncio.Task[None]] = []
    await other.subscribe("double", lambda message: answer(other, message, tasks))
    await other.round_trip(timeout_s=5)
    replies = await asyncio.gather(*(bus.request("double", b"%d." % index, timeout_s=10) for index in range(200)))
    assert replies == [b"%d.%d." % (index, index) for index in range(200)]


async def test_a_request_without_listener_fails_at_once(bus: Bus) -> None:
    """NoResponders, long before the timeout."""
    async with asyncio.timeout(5):
        with pytest.raises(NoResponders):
            await bus.request("nobody", b"", timeout_s=60)


async def test_a_request_without_reply_times_out(bus: Bus) -> None:
    """RequestTimeout, and a reply that comes later is dropped."""
    late: list[str] = []
    await bus.subscribe("slow", lambda message: late.append(message.reply))
    with pytest.raises(RequestTimeout):
        await bus.request("slow", b"", timeout_s=0.1)
    await bus.publish(late[0], b"too late")
    assert await bus.round_trip(timeout_s=5) >= 0


async def test_one_request_may_have_many_replies(backend: Backend, bus: Bus) -> None:
    """Replies come in order until the taker stops."""
    other = await backend.connect()
    inboxes: list[str] = []
    got: list[bytes] = []
    errors: list[BusError] = []
    await other.subscribe("many", lambda message: inboxes.append(message.reply))
    await other.round_trip(timeout_s=5)
    replies = await bus.request_many("many", b"", on_reply=got.append, on_error=errors.append)
    await until(lambda: len(inboxes) == 1)
    for index in range(5):
        await other.publish(inboxes[0], b"%d" % index)
    await until(lambda: len(got) == 5)
    await replies.stop()
    await other.publish(inboxes[0], b"late")
    await other.round_trip(timeout_s=5)
    await bus.round_trip(timeout_s=5)
    await bus.request_many("nobody", b"", on_reply=got.append, on_error=errors.append)
    await until(lambda: len(errors) == 1)
    assert got == [b"0", b"1", b"2", b"3", b"4"]
    assert isinstance(errors[0], NoResponders)


async def test_an_oversize_message_is_refused_here(bus: Bus) -> None:
    """Sending it would cost the connection, so it is not sent."""
    with pytest.raises(PayloadTooLarge):
        await bus.publish("s", bytes(bus.payload_bytes_max + 1))
    with pytest.raises(PayloadTooLarge):
        await bus.request("s", bytes(bus.payload_bytes_max + 1), timeout_s=1)
    seen: list[int] = []
    await bus.subscribe("s", lambda message: seen.append(len(message.payload)))
    await bus.publish("s", bytes(bus.payload_bytes_max))
    await until(lambda: len(seen) == 1)
    assert seen == [8 * 1024 * 1024]


async def test_waiting_requests_fail_when_the_connection_is_lost(backend: Backend, bus: Bus) -> None:
    """Nobody waits for the timeout of a request that cannot be answered any more; afterwards everything works again."""
    other = await backend.connect()
    seen: list[bytes] = []
    back: list[str] = []
    await other.subscribe("s", lambda message: seen.append(message.payload))
    await other.round_trip(timeout_s=5)
    bus.on_reconnected(lambda: back.append("bus"))
    waiting = asyncio.create_task(bus.request("s", b"asked", timeout_s=120))
    await until(lambda: seen == [b"asked"])
    await backend.restart()
    with pytest.raises(BusUnavailable):
        await waiting
    await until(lambda: back == ["bus"])
    for one in backend.buses:
        await one.round_trip(timeout_s=5)
    await bus.publish("s", b"after")
    await until(lambda: seen == [b"asked", b"after"])


async def test_a_closed_bus_refuses(backend: Backend) -> None:
    """Closing twice is harmless."""
    bus = await backend.connect()
    await bus.close()
    await bus.close()
    assert not bus.connected
    with pytest.raises(BusUnavailable):
        await bus.publish("s", b"")
    with pytest.raises(BusUnavailable):
        await bus.round_trip(timeout_s=1)


async def test_close_sends_what_was_published(backend: Backend, bus: Bus) -> None:
    """The last words of a process arrive."""
    seen: list[bytes] = []
    await bus.subscribe("last", lambda message: seen.append(message.payload))
    await bus.round_trip(timeout_s=5)
    other = await backend.connect()
    for index in range(50):
        await other.publish("last", b"%d" % index)
    await other.close()
    await until(lambda: len(seen) == 50)


# ------------------------------------------------------------------------------------------------------- the work-queue


async def test_tickets_are_pulled_in_order_and_gone_after_the_ack(bus: Bus) -> None:
    """Credits come back either as tickets or as one expiry."""
    await bus.ensure_queue()
    first = await put(bus, "a")
    second = await put(bus, "b")
    assert (first.duplicate, second.sequence > first.sequence) == (False, True)
    assert first.created == await bus.queue_created(MODEL)
    lines = Lines()
    puller = await lines.open(bus)
    await puller.pull(3, 0.3)
    await until(lambda: lines.returned == [1])
    assert [(t.payload, t.sequence, t.deliveries) for t in lines.tickets] == [
        (b"a", first.sequence, 1),
        (b"b", second.sequence, 1),
    ]
    await bus.queue_ack(lines.tickets[0].token)
    await bus.round_trip(timeout_s=5)
    assert not await bus.queue_delete(first)
    assert await bus.queue_delete(second)


async def test_a_ticket_goes_to_a_waiting_pull_of_its_own_lane(backend: Backend, bus: Bus) -> None:
    """A pull waits for tickets; lanes and models do not mix."""
    await bus.ensure_queue()
    small, large, other = Lines(), Lines(), Lines()
    pullers = [await small.open(bus), await large.open(bus, lane=Lane.LARGE), await other.open(bus, OTHER_MODEL)]
    for puller in pullers:
        await puller.pull(1, 1)
    publisher = await backend.connect()
    await put(publisher, "large", lane=Lane.LARGE)
    await put(publisher, "other", model=OTHER_MODEL)
    await until(lambda: bool(large.tickets and other.tickets) and small.returned == [1])
    assert (small.payloads, large.payloads, other.payloads) == ([], [b"large"], [b"other"])
    assert (large.returned, other.returned) == ([], [])


async def test_each_ticket_goes_to_one_of_many_pullers(backend: Backend, bus: Bus) -> None:
    """Replicas share a lane; the sum of tickets and returned credits is what was granted."""
    await bus.ensure_queue()
    lines = [Lines() for _ in range(3)]
    for one in lines:
        puller = await one.open(await backend.connect())
        await puller.pull(1, 1)
        await puller.pull(2, 1)
    for index in range(7):
        await put(bus, str(index))
    await until(lambda: sum(len(one.tickets) + sum(one.returned) for one in lines) == 9)
    assert sorted(itertools.chain(*(one.payloads for one in lines))) == [b"%d" % index for index in range(7)]


async def test_an_unacknowledged_ticket_is_delivered_again(bus: Bus) -> None:
    """After ack_wait, with the count of deliveries raised; its late acknowledgement counts."""
    await bus.ensure_queue()
    stored = await put(bus, "a")
    lines = Lines()
    puller = await lines.open(bus)
    for _ in range(2):
        delivered = len(lines.tickets)
        while len(lines.tickets) == delivered:
            returned = len(lines.returned)
            await puller.pull(1, 1)
            await until(lambda d=delivered, r=returned: len(lines.tickets) > d or len(lines.returned) > r)  # type: ignore[misc]
    assert [ticket.deliveries for ticket in lines.tickets] == [1, 2]
    await bus.queue_ack(lines.tickets[0].token)
    await bus.round_trip(timeout_s=5)
    assert not await bus.queue_delete(stored)


async def test_a_repeated_id_is_swallowed_even_after_the_ack(bus: Bus) -> None:
    """The window counts from the first publication, whatever became of it."""
    await bus.ensure_queue()
    first = await put(bus, "a")
    lines = Lines()
    puller = await lines.open(bus)
    await puller.pull(1, 1)
    await until(lambda: len(lines.tickets) == 1)
    await bus.queue_ack(lines.tickets[0].token)
    await bus.round_trip(timeout_s=5)
    again = await put(bus, "a")
    assert (again.duplicate, again.sequence) == (True, first.sequence)
    await puller.pull(1, 0.2)
    await until(lambda: lines.returned == [1])
    assert len(lines.tickets) == 1


async def test_a_ticket_expires_after_whole_seconds(backend: Backend, bus: Bus) -> None:
    """Nobody is told, and it is not delivered."""
    await bus.ensure_queue()
    await put(bus, "short", ttl_s=1)
    await put(bus, "long", ttl_s=TTL_S)
    await asyncio.sleep(2.2)
    lines = Lines()
    puller = await lines.open(bus)
    await puller.pull(2, 0.2)
    await until(lambda: lines.returned == [1])
    assert lines.payloads == [b"long"]


async def test_a_full_queue_refuses_and_recovers(bus: Bus) -> None:
    """No old ticket is dropped for a new one, and room is made by the first acknowledgement (PAINS L8)."""
    await bus.ensure_queue()
    for index in range(LIMITS.messages_max):
        await put(bus, str(index))
    with pytest.raises(QueueFull):
        await put(bus, "more")
    lines = Lines()
    puller = await lines.open(bus)
    await puller.pull(1, 1)
    await until(lambda: lines.payloads == [b"0"])
    await bus.queue_ack(lines.tickets[0].token)
    for _ in range(100):
        with suppress(QueueFull):
            assert not (await put(bus, "more")).duplicate
            break
        await asyncio.sleep(0.02)  # the server takes an acknowledgement in its own time
    else:
        pytest.fail("no room was made")
    with pytest.raises(QueueFull):
        await put(bus, "again")


async def test_a_pulled_ticket_can_be_deleted_and_its_late_ack_is_harmless(bus: Bus) -> None:
    """A cancelled request leaves the queue wherever its ticket is."""
    await bus.ensure_queue()
    waiting, pulled = await put(bus, "waiting"), await put(bus, "pulled")
    assert await bus.queue_delete(waiting)
    assert not await bus.queue_delete(waiting)
    lines = Lines()
    puller = await lines.open(bus)
    await puller.pull(1, 1)
    await until(lambda: lines.payloads == [b"pulled"])
    assert await bus.queue_delete(pulled)
    await bus.queue_ack(lines.tickets[0].token)
    await bus.round_trip(timeout_s=5)
    await put(bus, "next")
    await puller.pull(2, 0.3)
    await until(lambda: lines.returned == [1])
    assert lines.payloads == [b"pulled", b"next"]


async def test_an_ack_may_come_from_another_connection(backend: Backend, bus: Bus) -> None:
    """The token is enough."""
    await bus.ensure_queue()
    stored = await put(bus, "a")
    lines = Lines()
    puller = await lines.open(bus)
    await puller.pull(1, 1)
    await until(lambda: len(lines.tickets) == 1)
    other = await backend.connect()
    await other.queue_ack(lines.tickets[0].token)
    await other.round_trip(timeout_s=5)
    assert not await bus.queue_delete(stored)


async def test_a_stopped_puller_gets_nothing(bus: Bus) -> None:
    """Its open pulls are forgotten, and others get the tickets."""
    await bus.ensure_queue()
    stopped, going = Lines(), Lines()
    puller = await stopped.open(bus)
    await puller.pull(5, 1)
    await puller.stop()
    await puller.stop()
    await bus.round_trip(timeout_s=5)
    other = await going.open(bus)
    await other.pull(1, 1)
    await put(bus, "a")
    await until(lambda: going.payloads == [b"a"], within_s=1.5)
    assert (stopped.tickets, stopped.returned) == ([], [])


async def test_the_queue_is_lost_with_the_server_and_made_again(backend: Backend, bus: Bus) -> None:
    """Open pulls give their credits back, a publish says what is missing, and after ensure_queue all goes on (PAINS L1)."""
    await bus.ensure_queue()
    old = await put(bus, "old")
    lines = Lines()
    puller = await lines.open(bus)
    await puller.pull(1, 1)
    await until(lambda: lines.payloads == [b"old"])
    await puller.pull(2, 1)
    await puller.pull(1, 1)
    await backend.restart()
    await until(lambda: sum(lines.returned) == 3)
    assert await bus.queue_created(MODEL) is None
    with pytest.raises(QueueMissing):
        await put(bus, "old")
    await puller.pull(2, 0.2)
    await until(lambda: sum(lines.returned) == 5)
    await bus.queue_ack(lines.tickets[0].token)
    assert not await bus.queue_delete(old)
    await bus.ensure_queue()
    # The new stream knows no message ids and counts from one again, so an old sequence now means another ticket.
    new = await put(bus, "old")
    assert (new.duplicate, new.sequence, new.created != old.created) == (False, old.sequence, True)
    assert not await bus.queue_delete(old)
    await puller.pull(1, 1)
    await until(lambda: lines.payloads == [b"old", b"old"])
    assert lines.tickets[-1].deliveries == 1
    assert await bus.queue_delete(new)


async def test_a_queue_that_never_was_is_missing(bus: Bus) -> None:
    """Publishing names it, deleting and pulling do not fail."""
    assert await bus.queue_created(MODEL) is None
    with pytest.raises(QueueMissing):
        await put(bus, "a")
    assert not await bus.queue_delete(Stored(shard=0, sequence=1, created=1))
    lines = Lines()
    puller = await lines.open(bus)
    await puller.pull(4, 0.1)
    await until(lambda: lines.returned == [4])


# ------------------------------------------------------------------------------------------------ small state and streams


async def test_values_are_compared_and_set(bus: Bus) -> None:
    """Revision 0 creates, a revision replaces just that value, none overwrites; removal allows creation again."""
    assert await bus.kv_get("bucket", "key") is None
    first = await bus.kv_put("bucket", "key", b"1", expected_revision=0)
    with pytest.raises(WrongRevision):
        await bus.kv_put("bucket", "key", b"x", expected_revision=0)
    second = await bus.kv_put("bucket", "key", b"2", expected_revision=first)
    with pytest.raises(WrongRevision):
        await bus.kv_put("bucket", "key", b"x", expected_revision=first)
    third = await bus.kv_put("bucket", "key", b"3")
    assert first < second < third
    assert await bus.kv_get("bucket", "key") == KvEntry("key", b"3", third)
    other = await bus.kv_put("bucket", "another.key", b"")
    assert await bus.kv_entries("bucket") == [KvEntry("another.key", b"", other), KvEntry("key", b"3", third)]
    await bus.kv_delete("bucket", "key")
    await bus.kv_delete("bucket", "key")
    assert await bus.kv_get("bucket", "key") is None
    assert [entry.key for entry in await bus.kv_entries("bucket")] == ["another.key"]
    assert await bus.kv_put("bucket", "key", b"4", expected_revision=0) > other


async def test_one_of_many_wins_a_compare_and_set(backend: Backend, bus: Bus) -> None:
    """What a lease stands on."""
    buses = [bus, *[await backend.connect() for _ in range(3)]]
    outcomes = await asyncio.gather(
        *(one.kv_put("leader", "lease", b"%d" % i, expected_revision=0) for i, one in enumerate(buses)),
        return_exceptions=True,
    )
    assert sorted(type(outcome).__name__ for outcome in outcomes) == ["WrongRevision"] * 3 + ["int"]


async def test_a_watch_tells_present_entries_and_changes(backend: Backend, bus: Bus) -> None:
    """In order, removals as None, nothing after its end."""
    revision = await bus.kv_put("bucket", "a", b"1")
    seen: list[tuple[str, bytes | None]] = []
    watch = await bus.kv_watch("bucket", lambda key, entry: seen.append((key, entry.value if entry else None)))
    await until(lambda: len(seen) == 1)
    other = await backend.connect()
    await other.kv_put("bucket", "a", b"2", expected_revision=revision)
    await other.kv_put("bucket", "b", b"3")
    await other.kv_delete("bucket", "a")
    await until(lambda: len(seen) == 4)
    await watch.stop()
    await watch.stop()
    await other.kv_put("bucket", "b", b"4")
    await bus.round_trip(timeout_s=5)
    assert seen == [("a", b"1"), ("a", b"2"), ("b", b"3"), ("a", None)]


async def test_a_watch_survives_a_restart(backend: Backend, bus: Bus) -> None:
    """Files are still there, nothing is told twice, and later changes are told."""
    await bus.kv_put("bucket", "a", b"1")
    await bus.kv_put("bucket", "b", b"1")
    seen: list[tuple[str, bytes | None]] = []
    await bus.kv_watch("bucket", lambda key, entry: seen.append((key, entry.value if entry else None)))
    await until(lambda: len(seen) == 2)
    await backend.restart()
    assert (await bus.kv_get("bucket", "a") or KvEntry("", b"", 0)).value == b"1"
    await bus.kv_put("bucket", "a", b"2")
    await bus.kv_delete("bucket", "b")
    await until(lambda: len(seen) >= 4)
    assert seen[:2] == [("a", b"1"), ("b", b"1")]
    assert sorted(seen[2:], key=str) == [("a", b"2"), ("b", None)]


async def test_a_stream_keeps_messages_and_guards_its_end(backend: Backend, bus: Bus) -> None:
    """Appends with an expected last sequence are fenced; plain publishes are kept too; subscribers hear them."""
    heard: list[bytes] = []
    with pytest.raises(QueueMissing):
        await bus.stream_publish("log.a", b"0")
    await bus.subscribe("log.>", lambda message: heard.append(message.payload))
    await bus.ensure_stream("log", ["log.>"])
    await bus.ensure_stream("log", ["log.>"])
    assert await bus.stream_read("log") == []
    assert await bus.stream_publish("log.a", b"1", expected_last_sequence=0) == 1
    with pytest.raises(WrongRevision):
        await bus.stream_publish("log.a", b"x", expected_last_sequence=0)
    assert await bus.stream_publish("log.b", b"2", expected_last_sequence=1) == 2
    await bus.publish("log.c", b"3")
    await until(lambda: heard[-1:] == [b"3"])
    await backend.restart()
    await bus.ensure_stream("log", ["log.>"])
    assert [(m.subject, m.payload, m.sequence) for m in await bus.stream_read("log", start_sequence=2)] == [
        ("log.b", b"2", 2),
        ("log.c", b"3", 3),
    ]
    assert [m.payload for m in await bus.stream_read("log", messages_max=1)] == [b"1"]
    assert list(await bus.stream_read("unknown")) == []
    assert [payload for payload in heard if payload != b"x"] == [b"1", b"2", b"3"]
