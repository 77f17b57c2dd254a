"""The simulated work-queue keeps what ``tests/contract`` holds a real server to, on virtual time."""

from __future__ import annotations

import pytest

from subjects.bus import ACK_WAIT_S, CONSUMER_IDLE_S, DUPLICATE_WINDOW_S, QueuedTicket, QueueLimits
from subjects.errors import QueueFull
from tests.sim.net import SimClock
from tests.sim.work_queue import PullRequest, SimQueue

LANE = "lane"


class Line:
    """A queue with room for eight tickets, and what a puller of one lane got from it."""

    def __init__(self) -> None:
        self.clock = SimClock()
        self.queue = SimQueue(self.clock, 0, 1, QueueLimits(messages_max=8))
        self.got: list[QueuedTicket] = []

    def put(self, text: str, *, ttl_s: int = 600) -> bool:
        """Stores a ticket whose id is its text; whether the id was known."""
        return self.queue.publish(LANE, text.encode(), message_id=text, ttl_s=ttl_s).duplicate

    def pull(self, credits: int = 1) -> PullRequest:
        """Asks for tickets."""
        request = PullRequest(credits, self.got.append)
        self.queue.pull(LANE, request)
        return request

    @property
    def told(self) -> list[tuple[bytes, int]]:
        """What came: payload and count of deliveries, in order."""
        return [(ticket.payload, ticket.deliveries) for ticket in self.got]

    def pass_s(self, seconds: float) -> None:
        """Lets time pass."""
        self.clock.run(self.clock.now() + seconds)


@pytest.fixture
def line() -> Line:
    """A fresh one."""
    return Line()


def test_a_pull_waits_for_tickets_and_shares_them_in_turn(line: Line) -> None:
    """Two open pulls take turns; a pull that was ended gets nothing."""
    first, second, ended = line.pull(2), line.pull(2), line.pull(2)
    line.queue.end_pull(LANE, ended)
    for text in "abc":
        line.put(text)
    assert (line.told, first.remaining, second.remaining) == ([(b"a", 1), (b"b", 1), (b"c", 1)], 0, 1)


def test_an_unacknowledged_ticket_comes_again(line: Line) -> None:
    """After ack_wait, not before; its late acknowledgement counts."""
    line.put("a")
    line.pull(2)
    line.pass_s(ACK_WAIT_S - 0.001)
    assert line.told == [(b"a", 1)]
    line.pass_s(0.002)
    assert line.told == [(b"a", 1), (b"a", 2)]
    line.queue.acknowledge(LANE, line.got[0].sequence)
    assert len(line.queue) == 0


def test_a_refused_ticket_comes_at_once_and_first(line: Line) -> None:
    """Before what nobody has seen; a refusal of an older delivery does nothing."""
    line.put("a")
    line.put("b")
    line.pull()
    line.queue.refuse(LANE, line.got[0].sequence, 1)
    line.pull()
    line.queue.refuse(LANE, line.got[0].sequence, 1)
    line.pull()
    assert line.told == [(b"a", 1), (b"a", 2), (b"b", 1)]


def test_a_repeated_id_is_swallowed_within_the_window(line: Line) -> None:
    """Counted from the first publication, whatever became of it."""
    line.put("a")
    line.pull()
    line.queue.acknowledge(LANE, line.got[0].sequence)
    line.pass_s(DUPLICATE_WINDOW_S - 0.001)
    assert line.put("a")
    line.pass_s(0.002)
    assert not line.put("a")


def test_a_ticket_expires_and_a_full_queue_refuses(line: Line) -> None:
    """An expired ticket makes room and is not delivered."""
    line.put("short", ttl_s=1)
    for text in "abcdefg":
        line.put(text)
    with pytest.raises(QueueFull):
        line.put("more")
    line.pass_s(1.001)
    assert not line.put("more")
    line.pull()
    assert line.told == [(b"a", 1)]


def test_an_idle_consumer_is_forgotten(line: Line) -> None:
    """Its count of deliveries starts again; tickets are not lost."""
    line.put("a")
    line.pull()
    line.pass_s(CONSUMER_IDLE_S + 1)
    line.pull()
    assert line.told == [(b"a", 1), (b"a", 1)]


def test_a_lost_queue_gives_nothing_more(line: Line) -> None:
    """Tickets, open pulls and timers are gone with the server's memory."""
    line.put("a")
    request = line.pull(2)
    line.queue.lose()
    line.pass_s(ACK_WAIT_S + 600)
    assert (line.told, request.open, len(line.queue)) == ([(b"a", 1)], False, 0)
