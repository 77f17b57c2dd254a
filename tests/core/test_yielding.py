"""A request that can no longer meet its first-token target waits behind those that can (ops/decisions/0009)."""

from __future__ import annotations

from math import inf

import msgspec
import pytest

from broker.core.requests import events as e
from broker.core.requests.admission import yields_at_s
from broker.core.requests.live import State
from subjects.messages import ModelDemand, SlaClass, StepCosts
from tests.core.test_admission import view
from tests.core.test_requests import OTHER, STORED, Gateway, R, profile

COSTS = StepCosts(prefill_token_s=1e-4, prefill_token2_s=1e-8, step_const_s=0.01)


def waiting(yields_s: float, sla_class: SlaClass = SlaClass.SILVER) -> Gateway:
    """A gateway whose only request waits in the work-queue."""
    gateway = Gateway()
    gateway(
        e.RequestSubmitted(
            request=R,
            profile=profile(sla_class=sla_class),
            body=b"{}",
            wait_until_s=20.0,
            deadline_s=100.0,
            yields_at_s=yields_s,
        )
    )
    gateway(e.TicketStored(R, 1, 1, STORED))
    return gateway


def queued(gateway: Gateway) -> list[tuple[SlaClass, int, float]]:
    """What the pool is told of waiting requests: class, how many, since when."""
    rows: tuple[ModelDemand, ...] = gateway.core.take_demand(gateway.now_s)
    return [(row.sla_class, row.waiting, row.oldest_wait_s) for row in rows if row.waiting]


def test_it_moves_to_the_batch_class_once() -> None:
    """The ticket is taken back and published again, same attempt; what waits where is told so; its wait goes on counting."""
    gateway = waiting(1.5)
    assert gateway.core.next_wake_s == pytest.approx(1.5)
    gateway.now_s = 1.5
    commands = gateway.core.step(1.5, e.Ticked())
    assert [type(command) for command in commands] == [e.DeleteTicket, e.PublishTicket]
    assert isinstance(commands[1], e.PublishTicket)
    ticket = commands[1].ticket
    assert (ticket.attempt, ticket.publication, ticket.profile.sla_class) == (1, 2, SlaClass.BATCH)
    assert queued(gateway) == [(SlaClass.BATCH, 1, 1.5)]
    gateway(e.TicketStored(R, 1, 2, STORED))
    assert gateway.core.next_wake_s == pytest.approx(20.0)
    assert gateway(e.Ticked(), after_s=1.0) == []
    gateway.claim()
    assert queued(gateway) == []


def test_a_claim_of_the_old_ticket_is_granted_all_the_same() -> None:
    """A replica may have pulled it just before; nothing is answered twice."""
    gateway = waiting(1.5)
    gateway(e.Ticked(), after_s=1.5)
    assert gateway.claim()[0].startswith("5: grant")
    assert gateway.claim(replica=OTHER, token=6) == ["6: refuse taken"]


def test_only_a_stored_ticket_is_taken_back() -> None:
    """While it is on its way nothing is known to delete; it yields as soon as it is stored."""
    gateway = Gateway()
    gateway(
        e.RequestSubmitted(request=R, profile=profile(), body=b"{}", wait_until_s=20.0, deadline_s=100.0, yields_at_s=1.5)
    )
    assert gateway(e.Ticked(), after_s=2.0) == []
    gateway(e.TicketStored(R, 1, 1, STORED))
    assert gateway.core.state_of(R) is State.STORED
    assert len(gateway(e.Ticked(), after_s=0.1)) == 2


def test_batch_has_nobody_to_yield_to() -> None:
    """Its ticket stays where it is."""
    gateway = waiting(1.5, SlaClass.BATCH)
    assert gateway(e.Ticked(), after_s=2.0) == []
    assert queued(gateway) == [(SlaClass.BATCH, 1, 2.0)]


def test_when_it_yields() -> None:
    """Target less its own prefill and one step on the fastest kind of device; never where no costs are known."""
    plain = view().record
    assert yields_at_s(plain, 1000, 5.0) == inf
    slow = msgspec.structs.replace(COSTS, prefill_token_s=1.0)
    known = msgspec.structs.replace(plain, costs={"a": slow, "b": COSTS})
    assert yields_at_s(known, 1000, 5.0) == pytest.approx(5.0 + 2.0 - 0.1 - 0.01 - 0.01)
    assert yields_at_s(known, 100_000, 5.0) == 5.0
