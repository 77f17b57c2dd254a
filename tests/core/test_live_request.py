"""One request on its own: grants in parts, what was taken, what is asked again."""

from __future__ import annotations

import pytest

from broker.core.requests.events import GRANT_PART_BYTES_MAX
from broker.core.requests.live import LiveRequest, Taken
from subjects.messages import Grant
from tests.core.test_requests import R, delta, profile


def live(body: bytes = b"{}", **fields: object) -> LiveRequest:
    """A request just submitted."""
    return LiveRequest(
        request=R,
        profile=profile(**fields),
        body=body,
        cache_salt="salt",
        submitted_s=0.0,
        wait_bound_s=20.0,
        wait_until_s=20.0,
        deadline_s=100.0,
    )


@pytest.mark.parametrize(
    ("body_bytes", "parts"),
    [(0, 1), (GRANT_PART_BYTES_MAX, 1), (GRANT_PART_BYTES_MAX + 1, 2), (GRANT_PART_BYTES_MAX * 3 - 1, 3)],
)
def test_the_parts_of_a_grant_make_the_whole(body_bytes: int, parts: int) -> None:
    """Nothing is lost or sent twice, and no part is too big for a message."""
    body = bytes(range(256)) * (body_bytes // 256) + bytes(body_bytes % 256)
    request = live(body)
    grants = [grant for part in range(parts) if (grant := request.grant(part)) is not None]
    assert [(grant.part, grant.parts) for grant in grants] == [(part, parts) for part in range(parts)]
    assert b"".join(grant.body for grant in grants) == body
    assert max(len(grant.body) for grant in grants) <= 256 * 1024
    assert (request.grant(parts), request.grant(-1)) == (None, None)


def test_only_the_first_part_says_what_was_sent() -> None:
    """A continuation goes on after the tokens that the client has; they are not repeated with every part."""
    request = live(bytes(GRANT_PART_BYTES_MAX + 1), continuable=True)
    assert request.take(delta(0, 2, token_ids=(7, 8))) is Taken.ACCEPTED
    request.begin_attempt(3.0)
    grants = [request.grant(part) for part in range(2)]
    assert [(g.attempt, g.sent_token_ids) for g in grants if isinstance(g, Grant)] == [(2, (7, 8)), (2, ())]
    assert (request.waits_since_s, request.next_indexes()) == (3.0, (2,))


def test_a_delta_counts_once_and_in_order() -> None:
    """What is ahead is a gap, what is behind a repeat; a last word without units closes; nothing follows a close."""
    request = live()
    assert request.take(delta(1)) is Taken.GAP
    assert request.take(delta(0, 2)) is Taken.ACCEPTED
    assert request.take(delta(0, 2)) is Taken.REPEATED
    assert request.take(delta(1, 2)) is Taken.REPEATED
    assert request.take(delta(2, 0)) is Taken.REPEATED
    assert not request.all_closed()
    assert request.take(delta(2, 0, finish_reason="stop")) is Taken.ACCEPTED
    assert request.all_closed()
    assert request.take(delta(2, 1)) is Taken.REPEATED
    assert request.take(delta(2, 1, end=True)) is Taken.REPEATED
    assert request.take(delta(2, 0, end=True)) is Taken.ACCEPTED
    assert request.next_indexes() == (2,)


def test_tokens_without_ids_cannot_be_continued() -> None:
    """Nor can several choices, nor what its profile rules out."""
    request = live(continuable=True)
    assert request.continuable()
    request.take(delta(0, 2))
    assert request.continuable() and request.sent_token_ids == [0, 1]
    request.take(delta(2, 1, token_ids=()))
    assert not request.continuable()
    request.take(delta(3, 1))
    assert not request.continuable()
    assert not live(continuable=True, n=2).continuable()
    assert not live(continuable=False).continuable()


def test_a_gap_is_asked_for_at_most_ten_times_a_second() -> None:
    """Behind: the choice itself; at the end: every other choice that is open."""
    request = live(n=3)
    assert request.gaps(1.0, delta(4, choice=1)) == [(1, 0)]
    assert request.gaps(1.0625, delta(4, choice=1)) == []
    assert request.gaps(1.125, delta(4, choice=1)) == [(1, 0)]
    request.take(delta(0, 1, choice=0, finish_reason="stop"))
    request.take(delta(0, 2, choice=2))
    last = delta(0, 1, choice=1, end=True)
    assert request.take(last) is Taken.GAP
    assert request.gaps(2.0, last) == [(2, 2)]
    request.begin_attempt(2.0)
    assert request.gaps(2.0, last) == [(2, 2)]
