"""Named mutants: the simulated world must notice when one rule of a core is broken (issue A, ``What shows it``)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest

from broker.core.requests.core import RequestCore
from broker.core.requests.events import ClientLeft, RequestCommand, RequestEvent
from broker.core.requests.live import LiveRequest, State
from subjects.ids import ReplicaId, RequestId
from subjects.messages import LoadModel
from tests.sim.world import Options, Violation, World
from workers.core.agent_refusals import Refusals
from workers.core.pulling import PullPlanner
from workers.core.replica import ReplicaCore
from workers.core.replica_events import AckTicket, ReplicaCommand, ReplicaEvent, SendClaim, TicketPulled

SEEDS_MAX = 48
CALM = Options(
    hosts=2,
    devices_per_host=1,
    device_units=2,
    models=2,
    gateways=1,
    latency_s=0.002,
    loss=0.0,
    request_rate=3.0,
    load_s=0.3,
    step_s=0.05,
    continuation=True,
    hands=False,
    pressure=False,
    faults=(),
)


def ack_before_grant(patch: pytest.MonkeyPatch) -> None:
    """The ticket is acknowledged when it is claimed: if the replica dies before the grant, nobody has it any more."""
    step = ReplicaCore.step

    def mutant(self: ReplicaCore, now_s: float, event: ReplicaEvent) -> list[ReplicaCommand]:
        commands = step(self, now_s, event)
        if isinstance(event, TicketPulled) and any(isinstance(command, SendClaim) for command in commands):
            return [AckTicket(event.token), *commands]
        return commands

    patch.setattr(ReplicaCore, "step", mutant)


def stale_attempt_accepted(patch: pytest.MonkeyPatch) -> None:
    """Deltas are taken from whoever sends them, for whatever attempt."""

    def mutant(self: RequestCore, replica: ReplicaId, request: RequestId, attempt: int) -> LiveRequest | None:
        live = self._live.get(request)
        return live if live is not None and live.state is State.RUNNING else None

    patch.setattr(RequestCore, "_held_by", mutant)


def cancel_ignored_while_waking(patch: pytest.MonkeyPatch) -> None:
    """A client that leaves before its request was granted is not heard."""
    step = RequestCore.step

    def mutant(self: RequestCore, now_s: float, event: RequestEvent) -> list[RequestCommand]:
        if isinstance(event, ClientLeft) and self.state_of(event.request) is not State.RUNNING:
            return []
        return step(self, now_s, event)

    patch.setattr(RequestCore, "step", mutant)


def ageing_off(patch: pytest.MonkeyPatch) -> None:
    """Smaller lanes are pulled for ever, however long a large one has not fitted."""
    patch.setattr(PullPlanner, "_note_ageing", lambda self, now_s, free_pages: 0)


def budget_checked_after_load(patch: pytest.MonkeyPatch) -> None:
    """A load is accepted whatever is free; the sum of budgets would be looked at later."""
    refusal = Refusals._load

    def mutant(self: Refusals, command: LoadModel) -> str:
        text = refusal(self, command)
        return "" if "bytes are free" in text else text

    patch.setattr(Refusals, "_load", mutant)


@dataclass(frozen=True)
class Case:
    """A mutant, the world in which it matters, and what is seen of it."""

    apply: Callable[[pytest.MonkeyPatch], None]
    options: Options
    seen: str


CASES = (
    Case(ack_before_grant, replace(CALM, faults=("replica-killed-while-claiming",)), "had room in time"),
    Case(stale_attempt_accepted, replace(CALM, faults=("replica-cut-off",)), "gets a delta of attempt"),
    Case(cancel_ignored_while_waking, replace(CALM, faults=("client-leaves-cold-model",)), "client left"),
    Case(ageing_off, replace(CALM, pressure=True, hosts=1), "beside small ones"),
    Case(budget_checked_after_load, replace(CALM, faults=("load-by-hand",)), "is charged"),
)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.apply.__name__)
def test_the_mutant_is_caught(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same seed passes with the rule and fails without it, for the very reason of the rule."""
    for seed in range(SEEDS_MAX):
        with monkeypatch.context() as patch:
            case.apply(patch)
            try:
                World(seed, case.options).run()
                continue
            except Violation as violation:
                assert case.seen in str(violation)
        World(seed, case.options).run()
        return
    pytest.fail(f"none of {SEEDS_MAX} seeds noticed {case.apply.__name__}")
