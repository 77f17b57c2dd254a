"""The replica's core at its bounds."""

from __future__ import annotations

import pytest

from tests.core.test_replica import R, Replica, ticket
from workers.core import replica_events as e


@pytest.mark.parametrize(("deliveries", "given_up"), [(4, False), (5, True), (6, True)])
def test_a_ticket_nobody_claims_is_given_up_at_its_fifth_delivery_or_later(deliveries: int, given_up: bool) -> None:
    """A count that skipped the fifth is no reason to go on for ever."""
    replica = Replica()
    replica.pull(ticket(), "t", deliveries)
    lines: list[str] = []
    for _ in range(10):
        lines += replica(e.ClaimUnanswered(R, 1, e.Unanswered.TIMEOUT), after_s=0.5)
    assert ("ack t" in lines) is given_up
