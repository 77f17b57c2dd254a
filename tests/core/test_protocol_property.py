"""Both cores together under every fault, as a state machine: no token lost, doubled, foreign or out of order; every request
ends exactly once; an attempt that is over ends within a second of contact; everything ends and nothing leaks after healing.

``PROTOCOL_EXAMPLES`` sets how many histories are tried (default: a few seconds' worth).
"""

from __future__ import annotations

import os
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from subjects.messages import FailureKind, Lane, SlaClass
from tests.core.protocol_world import Faults, GatewayProcess, ReplicaProcess, World

REPLICAS_MAX = 3
GATEWAYS_MAX = 2


class Protocol(RuleBasedStateMachine):
    """Draws histories of requests and troubles."""

    world: World

    @initialize(seed=st.integers(0, 2**32 - 1), gateways=st.integers(1, GATEWAYS_MAX), replicas=st.integers(0, REPLICAS_MAX))
    def start(self, seed: int, gateways: int, replicas: int) -> None:
        """A pool, perhaps still without a replica."""
        self.world = World(seed)
        for _ in range(gateways):
            self.world.start_gateway()
        for _ in range(replicas):
            self.world.start_replica()

    def _alive(self, kind: str) -> list[Any]:
        processes: list[Any] = list(self.world.gateways if kind == "gateway" else self.world.replicas)
        return [process for process in processes if process.alive]

    def _pick(self, kind: str, data: st.DataObject) -> Any:
        """A process to trouble: a replica at work where there is one, since trouble for idle ones shows little."""
        alive = self._alive(kind)
        alive = [process for process in alive if kind == "replica" and process.runs] or alive
        return data.draw(st.sampled_from(alive)) if alive else None

    @rule(
        data=st.data(),
        totals=st.one_of(
            st.lists(st.integers(1, 150), min_size=1, max_size=1), st.lists(st.integers(1, 20), min_size=2, max_size=3)
        ),
        sla_class=st.sampled_from(SlaClass),
        lane=st.sampled_from([Lane.SMALL, Lane.SMALL, Lane.MEDIUM, Lane.LARGE]),
        failures=st.one_of(st.just([]), st.lists(st.sampled_from(FailureKind), max_size=4)),
        prefills_s=st.lists(st.sampled_from([0.0, 0.1, 1.0, 3.0]), max_size=3),
        body_bytes=st.sampled_from([0, 10, 300_000]),
        stream=st.booleans(),
        count=st.sampled_from([1, 1, 3]),
    )
    def submit(
        self,
        data: st.DataObject,
        totals: list[int],
        sla_class: SlaClass,
        lane: Lane,
        failures: list[FailureKind],
        prefills_s: list[float],
        body_bytes: int,
        stream: bool,
        count: int,
    ) -> None:
        """Requests arrive."""
        gateway = self._pick("gateway", data)
        for _ in range(count if gateway is not None else 0):
            self.world.submit(
                gateway,
                totals=list(totals),
                sla_class=sla_class,
                lane=lane,
                failures=list(failures),
                prefills_s=list(prefills_s),
                body_bytes=body_bytes,
                stream=stream,
            )

    @rule(data=st.data())
    def client_leaves(self, data: st.DataObject) -> None:
        """A client closes its connection, at any moment of its request."""
        there = [request for request, c in self.world.clients.items() if c.outcome is None and not c.left]
        if there:
            self.world.leave(data.draw(st.sampled_from(there)))

    @rule(duration_s=st.sampled_from([0.001, 0.003, 0.02, 0.1, 0.25, 1.0, 3.0]))
    def time_passes(self, duration_s: float) -> None:
        """Time passes."""
        self._let_pass(duration_s)

    @rule(hands=st.booleans())
    def replicas_tell_their_room(self, hands: bool) -> None:
        """Or do not, as those of an older version."""
        self.world.hands = hands

    @precondition(lambda self: bool(self.world.replicas))
    @rule(data=st.data())
    def a_prefix_is_told_of(self, data: st.DataObject) -> None:
        """The index says that a replica, perhaps a dead one, has the prefix of all prompts: requests may wait for it."""
        self.world.tell_prefix(data.draw(st.sampled_from(self.world.replicas)))

    @rule(
        loss=st.sampled_from([0.0, 0.0, 0.05, 0.3]),
        doubling=st.sampled_from([0.0, 0.2]),
        delay_s=st.sampled_from([0.001, 0.02, 0.4]),
        reorder=st.booleans(),
    )
    def network_changes(self, loss: float, doubling: float, delay_s: float, reorder: bool) -> None:
        """The network gets worse or better."""
        self.world.faults = Faults(loss, doubling, delay_s, reorder)
        self.world.trouble = self.world.trouble or loss > 0 or delay_s > 0.1

    @precondition(lambda self: len(self._alive("replica")) < REPLICAS_MAX)
    @rule()
    def replica_starts(self) -> None:
        """A replica is loaded."""
        self.world.start_replica()

    @rule(data=st.data(), noticed=st.booleans())
    def replica_dies(self, data: st.DataObject, noticed: bool) -> None:
        """Kill -9 of a replica, noticed by its agent or by nobody."""
        replica: ReplicaProcess | None = self._pick("replica", data)
        if replica is not None:
            self.world.kill(replica, noticed=noticed)

    @rule(data=st.data())
    def replica_is_declared_dead(self, data: st.DataObject) -> None:
        """The scheduler errs: a living replica is listed as dead, for ever."""
        replica: ReplicaProcess | None = self._pick("replica", data)
        if replica is not None:
            self.world.declare_dead(replica)

    @rule(data=st.data(), bound_s=st.sampled_from([0.1, 1.0, 10.0]))
    def replica_drains(self, data: st.DataObject, bound_s: float) -> None:
        """A replica is drained."""
        replica: ReplicaProcess | None = self._pick("replica", data)
        if replica is not None:
            self.world.trouble = True
            self.world.drain(replica, bound_s)

    @rule(data=st.data())
    def gateway_restarts(self, data: st.DataObject) -> None:
        """Kill -9 of a gateway and a new incarnation."""
        gateway: GatewayProcess | None = self._pick("gateway", data)
        if gateway is not None:
            self.world.kill(gateway)
            self.world.start_gateway()

    @rule(data=st.data(), kind=st.sampled_from(["gateway", "replica"]), duration_s=st.sampled_from([0.2, 1.5, 3.0, 12.0]))
    def process_freezes(self, data: st.DataObject, kind: str, duration_s: float) -> None:
        """SIGSTOP for a while."""
        process = self._pick(kind, data)
        if process is not None:
            self.world.freeze(process, duration_s)

    @rule(data=st.data(), kind=st.sampled_from(["gateway", "replica"]), duration_s=st.sampled_from([0.2, 1.5, 4.0, 12.0]))
    def process_is_cut_off(self, data: st.DataObject, kind: str, duration_s: float) -> None:
        """A process loses the bus for a while."""
        process = self._pick(kind, data)
        if process is not None:
            self.world.cut_off(process, duration_s)

    @precondition(lambda self: self._alive("replica"))
    @rule(
        data=st.data(),
        prefills_s=st.lists(st.sampled_from([0.1, 1.0, 3.0]), min_size=2, max_size=2),
        trouble=st.sampled_from(["cut off", "frozen", "gateway cut off", "gateway frozen", "killed", "left"]),
        duration_s=st.sampled_from([1.5, 4.0, 12.0]),
    )
    def trouble_before_the_first_token(
        self, data: st.DataObject, prefills_s: list[float], trouble: str, duration_s: float
    ) -> None:
        """A request is granted and computes its prompt when its holder, its gateway or its client has trouble."""
        gateway = self._pick("gateway", data)
        request = self.world.submit(gateway, totals=[5], prefills_s=list(prefills_s))
        self.world.advance(0.05)
        holder = next((r for r in self._alive("replica") if (request, 1) in r.runs), None)
        match trouble:
            case "cut off" if holder is not None:
                self.world.cut_off(holder, duration_s)
            case "frozen" if holder is not None:
                self.world.freeze(holder, duration_s)
            case "gateway cut off":
                self.world.cut_off(gateway, duration_s)
            case "gateway frozen":
                self.world.freeze(gateway, duration_s)
            case "killed" if holder is not None:
                self.world.kill(holder, noticed=False)
            case "left":
                self.world.leave(request)
            case _:
                pass

    @rule(down_s=st.sampled_from([0.1, 1.0, 4.0]))
    def bus_restarts(self, down_s: float) -> None:
        """Kill -9 of the NATS server: memory streams and their consumers are gone."""
        self.world.restart_bus(down_s)

    @invariant()
    def life_goes_on(self) -> None:
        """Between any two of these things requests come, replicas are replaced and time passes, so that trouble meets
        requests in every state. All of it follows from the seed of the world."""
        world = self.world
        unended = sum(client.outcome is None and not client.left for client in world.clients.values())
        if unended < 5 and world.random.random() < 0.6:
            prefills_s = [world.random.choice([0.0, 0.0, 0.3, 2.0, 4.0]) for _ in range(3)]
            gateway = world.random.choice(self._alive("gateway"))
            world.submit(gateway, totals=[world.random.choice([1, 5, 40, 100])], prefills_s=prefills_s)
        serving = [replica for replica in self._alive("replica") if not replica.core._draining]
        if len(serving) < 2 and world.random.random() < 0.3:
            world.start_replica()
        self._let_pass(world.random.choice([0.003, 0.03, 0.1, 0.25, 0.25, 1.0]))

    def _let_pass(self, duration_s: float) -> None:
        for _ in range(max(1, int(duration_s / 0.25))):
            self.world.advance(min(duration_s, 0.25))

    def teardown(self) -> None:
        """First safety, then liveness."""
        if hasattr(self, "world"):
            self.world.heal_and_check()


TestProtocol = Protocol.TestCase
TestProtocol.settings = settings(
    max_examples=int(os.environ.get("PROTOCOL_EXAMPLES", "25")),
    stateful_step_count=30,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
