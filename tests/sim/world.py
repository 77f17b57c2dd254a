"""A whole pool in virtual time: the production cores of gateways, scheduler, agents and replicas, and faults from a seed.

A run has two parts. In the first faults happen and *safety* is checked at every event. Then everything is healed, and
*liveness* is checked: each request ends, each model answers again, and nothing is held anywhere.
"""

from __future__ import annotations

import json
import math
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from broker.core.pool import events as sch
from broker.core.requests import events as req
from subjects.codec import decode
from subjects.ids import DeploymentKey, IngressId, ModelHash, OperationId, ReplicaId, RequestId, Tenant, WorkerId, base_name
from subjects.messages import (
    LANE_PAGES_MAX,
    Delta,
    Endpoint,
    EngineType,
    Grant,
    Lane,
    LoadModel,
    ModelRecord,
    PoolDigest,
    RequestProfile,
    SlaClass,
    Ticket,
)
from tests.sim.net import Network, SimClock
from tests.sim.nodes import AgentNode, GatewayNode, ReplicaNode, SchedulerNode
from workers.core.simulated import SimulatedProfile, expected_token

CHAOS_S = 20.0
SETTLE_S_MAX = 240.0
PROBE_S_MAX = 240.0
WAIT_S = 150.0
"""What a client waits for a replica; the policy's own bounds are far below this."""
DEADLINE_S = 600.0
CANCEL_REACHES_ENGINE_S = 2.0
"""A cancel that its message did not carry is carried by two ``Held`` within this time."""
BLOCK = 32
KV_PAGES = 600
CONTEXT = KV_PAGES * BLOCK
UNIT_BYTES = 100_000
YIELDING_SHARE = 0.3
LONG_BODY_SHARE = 0.01
EXCUSES = (
    "load-failed",
    "engine-died",
    "agent-killed",
    "agent-frozen",
    "replica-killed",
    "replica-killed-while-claiming",
    "replica-frozen",
)
"""After any of these a model may be refused for a while: its loads failed, or its replicas died as in a crash loop."""


class Violation(AssertionError):
    """Something happened that must never happen, or did not happen that must."""


@dataclass(frozen=True, slots=True)
class Options:
    """What a seed decides beside the moments of its faults."""

    hosts: int
    devices_per_host: int
    device_units: int
    models: int
    gateways: int
    latency_s: float
    loss: float
    request_rate: float
    load_s: float
    step_s: float
    continuation: bool
    hands: bool
    pressure: bool
    """Small requests over capacity for a minute, with one large request among them."""
    faults: tuple[str, ...]


FAULTS = (
    "replica-killed",
    "replica-killed-while-claiming",
    "replica-frozen",
    "replica-cut-off",
    "engine-dies",
    "agent-killed",
    "agent-frozen",
    "scheduler-paused",
    "scheduler-restarted",
    "leader-replaced",
    "gateway-restarted",
    "gateway-paused",
    "bus-restarted-streams-lost",
    "bus-blip",
    "loads-fail",
    "loads-slow",
    "burst",
    "unload-asked",
    "load-by-hand",
    "clients-leave",
    "client-leaves-cold-model",
)


def draw_options(draw: random.Random) -> Options:
    """Small pools: most faults need few processes, and small worlds run fast."""
    picked = tuple(sorted(draw.sample(FAULTS, draw.randint(0, 5))))
    return Options(
        hosts=draw.randint(1, 3),
        devices_per_host=draw.randint(1, 2),
        device_units=draw.randint(2, 3),
        models=draw.randint(2, 5),
        gateways=draw.randint(1, 2),
        latency_s=draw.choice((0.0005, 0.002, 0.02)),
        loss=draw.choice((0.0, 0.0, 0.01, 0.05)),
        request_rate=draw.choice((0.5, 2.0, 5.0)),
        load_s=draw.choice((0.3, 1.0, 4.0)),
        step_s=draw.choice((0.02, 0.05)),
        continuation=draw.random() < 0.5,
        hands=draw.random() < 0.7,
        pressure=draw.random() < 0.1,
        faults=picked,
    )


@dataclass(slots=True)
class Client:
    """A request as its client sees it, and what the world knows of who may run it."""

    request: RequestId
    gateway: IngressId
    model: DeploymentKey
    tokens: int
    choices: int
    submitted_s: float
    attempt: int = 1
    granted: tuple[int, ReplicaId] | None = None
    next_indexes: list[int] = field(default_factory=list)
    left_s: float | None = None
    outcome: req.Outcome | None = None
    lost_with_gateway: bool = False
    starts: Counter[tuple[int, ReplicaId]] = field(default_factory=Counter)

    @property
    def over(self) -> bool:
        """Whether nothing more can come."""
        return self.outcome is not None or self.lost_with_gateway


class World:
    """One seed."""

    def __init__(self, seed: int, options: Options | None = None) -> None:
        self.seed = seed
        self.draw = random.Random(seed)
        drawn = draw_options(self.draw)
        self.options = drawn if options is None else options
        self.clock = SimClock()
        self.net = Network(self.clock, self.draw, latency_s=self.options.latency_s, loss=self.options.loss)
        self.seen: Counter[str] = Counter()
        self.tokens: dict[str, tuple[int, str, int]] = {}
        self.clients: dict[RequestId, Client] = {}
        self.gateways: dict[IngressId, GatewayNode] = {}
        self.agents: dict[WorkerId, AgentNode] = {}
        self.replicas: dict[ReplicaId, ReplicaNode] = {}
        self.schedulers: list[SchedulerNode] = []
        self.born: list[ReplicaId] = []
        self.last_digest: PoolDigest | None = None
        self.healed = False
        self._charged: dict[tuple[int, int], dict[ReplicaId, int]] = {}
        self._names = 0
        self._requests = 0
        self._epoch = 0
        self._slow_factor = 1.0
        self._failing: set[DeploymentKey] = set()
        self._engine_deaths_left = 0
        self._kill_claimers_left = 0
        self._resigned = False
        self._bus_down_s: list[tuple[float, float]] = []
        self.records = [self._record(index) for index in range(self.options.models)]
        self._settings = sch.SchedulerSettings(drain_s=10.0)
        for index in range(self.options.gateways):
            self._start_gateway(index)
        for host in range(self.options.hosts):
            self._start_agent(host)
        self._start_scheduler()

    # ---- the pieces

    def _record(self, index: int) -> ModelRecord:
        units = 2 if self.options.device_units > 2 and index == 0 else 1
        return ModelRecord(
            name=f"model{index}",
            model_hash=ModelHash(f"{index + 1:063x}a"),
            deployment=DeploymentKey(f"{index + 1:064x}"),
            weights_hash="",
            engine_type=EngineType.SIMULATED,
            source="",
            weights_bytes=units * UNIT_BYTES - CONTEXT,
            kv_bytes_per_token=1,
            kv_bytes=CONTEXT,
            budget_bytes=units * UNIT_BYTES,
            block_size=BLOCK,
            max_context_len=CONTEXT,
            max_replicas=2,
        )

    def engine_for(self, record: ModelRecord) -> SimulatedProfile:
        """The engine of the next replica of a model, with the faults of this moment."""
        profile = SimulatedProfile(
            slots=8,
            kv_pages=KV_PAGES,
            block_size=BLOCK,
            max_context_len=CONTEXT,
            prefill_token_s=1e-5,
            prefill_token2_s=0.0,
            step_const_s=self.options.step_s,
            step_request_s=0.0,
            step_context_token_s=0.0,
            chunk_tokens=CONTEXT,
            resizes_kv=False,
            load_s=self.options.load_s * self._slow_factor,
        )
        if self._slow_factor > 1:
            self.happened("load-slow")
        if record.deployment in self._failing:
            self.happened("load-failed")
            return replace(profile, load_fails=True)
        if self._engine_deaths_left > 0:
            self._engine_deaths_left -= 1
            return replace(profile, die_after_tokens=self.draw.randint(1, 60))
        return profile

    def _incarnation(self) -> int:
        self._names += 1
        return self._names

    def _start_gateway(self, index: int) -> None:
        gateway = GatewayNode(self, f"gateway{index}-{self._incarnation():010x}")
        self.gateways[gateway.ingress] = gateway

    def _start_agent(self, host: int) -> None:
        memory = (self.options.device_units * UNIT_BYTES,) * self.options.devices_per_host
        agent = AgentNode(self, host, self._incarnation(), memory)
        self.agents[agent.worker] = agent

    def _start_scheduler(self) -> None:
        self._epoch += 1
        self.schedulers.append(SchedulerNode(self, f"scheduler-{self._epoch}", self._epoch, self._settings))

    def scheduler_resigned(self, scheduler: SchedulerNode) -> None:
        """A leader found a higher epoch; it leads no more."""
        scheduler.die()
        self.schedulers.remove(scheduler)

    # ---- what the processes tell the world, and safety

    def happened(self, kind: str) -> None:
        """Counts an event by kind."""
        self.seen[kind] += 1

    def violated(self, text: str) -> None:
        """Ends the run."""
        raise Violation(f"seed {self.seed}, {self.clock.now():.3f} s: {text}")

    def replica_born(self, node: ReplicaNode, device: int) -> None:
        """A process exists and is charged from here on."""
        self.replicas[node.replica] = node
        self.born.append(node.replica)
        charged = self._charged.setdefault((node.agent.host, device), {})
        charged[node.replica] = node.record.budget_bytes
        if sum(charged.values()) > self.options.device_units * UNIT_BYTES:
            self.violated(f"device {device} of host {node.agent.host} is charged {sum(charged.values())} bytes")

    def replica_gone(self, node: ReplicaNode) -> None:
        """A process does not exist any more."""
        self.replicas.pop(node.replica, None)
        for charged in self._charged.values():
            charged.pop(node.replica, None)

    def granted(self, gateway: GatewayNode, grant: Grant, token: int) -> None:
        """A gateway grants a request; ``token`` is only told for the trace."""
        client = self.clients[grant.request]
        if client.over:
            self.violated(f"{grant.request} is granted after its end ({client.outcome}, claim {token})")
        if client.left_s is not None:
            self.violated(f"{grant.request} is granted after its client left")
        if grant.attempt != client.attempt:
            self.violated(f"attempt {grant.attempt} of {grant.request} is granted, current is {client.attempt}")

    def started(self, node: ReplicaNode, grant: Grant) -> None:
        """A replica gives a request to its engine."""
        client = self.clients[grant.request]
        client.starts[grant.attempt, node.replica] += 1
        if client.starts[grant.attempt, node.replica] > 1:
            self.violated(f"{node.replica} runs attempt {grant.attempt} of {grant.request} twice")
        holders = {replica for attempt, replica in client.starts if attempt == grant.attempt}
        if len(holders) > 1:
            self.violated(f"attempt {grant.attempt} of {grant.request} runs on {sorted(holders)}")

    def delivered(self, request: RequestId, delta: Delta) -> None:
        """A client gets a delta: the next one, of the current attempt, with this request's very tokens."""
        client = self.clients[request]
        if client.over or client.left_s is not None:
            self.violated(f"{request} gets a delta after its end")
        if delta.attempt != client.attempt:
            self.violated(f"{request} gets a delta of attempt {delta.attempt}, current is {client.attempt}")
        if delta.first_token_index != client.next_indexes[delta.choice]:
            self.violated(f"{request} gets index {delta.first_token_index}, next is {client.next_indexes[delta.choice]}")
        wanted = [expected_token(request, delta.first_token_index + offset, delta.choice) for offset in range(delta.units)]
        if list(delta.token_ids) != wanted:
            self.violated(f"{request} gets tokens of another request or place")
        client.next_indexes[delta.choice] += delta.units

    def restarted(self, request: RequestId, attempt: int) -> None:
        """A request waits again under a new attempt."""
        client = self.clients[request]
        if client.over or attempt != client.attempt + 1:
            self.violated(f"{request} restarts as attempt {attempt} after {client.attempt}")
        if any(client.next_indexes):
            self.happened("continued")
            if not self.options.continuation:
                self.violated(f"{request} starts again after its first token")
        self.happened("restarted")
        client.attempt = attempt

    def ended(self, request: RequestId, outcome: req.Outcome) -> None:
        """A request ends, once."""
        client = self.clients[request]
        if client.over:
            self.violated(f"{request} ends twice")
        client.outcome = outcome
        self.happened(f"ended-{type(outcome).__name__.lower()}")
        if isinstance(outcome, req.Finished) and client.next_indexes != [client.tokens] * client.choices:
            self.violated(f"{request} finished with {client.next_indexes} of {client.tokens} tokens")
        if isinstance(outcome, req.Failed):
            self.happened(f"failed-{outcome.status}")
            self._judge_failure(client, outcome)

    def _judge_failure(self, client: Client, outcome: req.Failed) -> None:
        if outcome.status == 502 and self.options.faults:
            return
        excused = any(self.seen[kind] for kind in EXCUSES)
        if outcome.status == 503 and excused and "had room in time" not in outcome.message:
            return
        self.violated(f"{client.request} failed without a reason: {outcome.status} {outcome.message}")

    def dies_claiming(self, node: ReplicaNode) -> bool:
        """A replica is about to claim a request, the cruellest moment to die: True when it dies with the claim unsent."""
        if self._kill_claimers_left <= 0 or self.draw.random() < 0.5:
            return False
        self._kill_claimers_left -= 1
        self.happened("replica-killed-while-claiming")
        if self.draw.random() < 0.5:
            node.exit(-9)
            return True
        self.clock.call_later(self.draw.choice((0.0, self.options.latency_s)), lambda: node.exit(-9))
        return False

    # ---- clients

    def submit(
        self, model: ModelRecord, *, tokens: int, pages: int, choices: int = 1, sla_class: SlaClass = SlaClass.SILVER
    ) -> Client | None:
        """A client asks one of the gateways; None when none of them lives."""
        gateways = list(self.gateways.values())
        if not gateways:
            return None
        gateway = self.draw.choice(gateways)
        self._requests += 1
        request = RequestId(f"{gateway.ingress}-{self._requests}")
        continuable = self.options.continuation and choices == 1
        # Messages of one byte per four tokens fill the pages that are asked for.
        content = "x" * (4 * max(1, pages * BLOCK - tokens * choices - 8))
        fields = {"messages": [{"role": "user", "content": content}], "max_tokens": tokens, "n": choices}
        if self.draw.random() < LONG_BODY_SHARE:
            fields["user"] = "u" * 2 * req.GRANT_PART_BYTES_MAX
            self.happened("granted-in-parts")
        body = json.dumps(fields).encode()
        profile = RequestProfile(
            model_hash=model.model_hash,
            deployment=model.deployment,
            endpoint=Endpoint.CHAT,
            tenant=Tenant("t"),
            sla_class=sla_class,
            lane=next((lane for lane, most in LANE_PAGES_MAX.items() if pages <= most), Lane.LARGE),
            max_tokens=tokens,
            n=choices,
            input_tokens=len(content) // 4 + 4,
            expected_output_tokens=tokens,
            kv_pages_needed=pages,
            deadline_unix_s=1e9,
            continuable=continuable,
        )
        now_s = self.clock.now()
        client = Client(
            request=request,
            gateway=gateway.ingress,
            model=model.deployment,
            tokens=tokens,
            choices=choices,
            submitted_s=now_s,
            next_indexes=[0] * choices,
        )
        self.clients[request] = client
        event = req.RequestSubmitted(
            request=request,
            profile=profile,
            body=body,
            wait_until_s=now_s + WAIT_S,
            deadline_s=now_s + DEADLINE_S,
            yields_at_s=self._yields_at_s(now_s, request),
        )
        gateway.run(lambda: gateway.feed(event))
        return client

    def _yields_at_s(self, now_s: float, request: RequestId) -> float:
        """Some requests have a target. A draw of its own, so that the seeds' faults stay what they were."""
        draw = random.Random(f"{self.seed}/{request}")
        return now_s + draw.uniform(0.1, 3.0) if draw.random() < YIELDING_SHARE else math.inf

    def leave(self, client: Client) -> None:
        """The client closes its connection."""
        gateway = self.gateways.get(client.gateway)
        if client.over or client.left_s is not None or gateway is None or gateway.paused_until_s > self.clock.now():
            return
        state = gateway.core.state_of(client.request)
        self.happened("client-left-running" if client.starts else "client-left-waiting")
        if not any(node.record.deployment == client.model and node.serving for node in self.replicas.values()):
            self.happened("client-left-while-waking")
        assert state is not None
        # Noted first: a core that forgets nothing would otherwise end the request before the world knows why.
        gateway.feed(req.ClientLeft(client.request))
        client.left_s = self.clock.now()
        left_s = client.left_s
        self.clock.call_later(CANCEL_REACHES_ENGINE_S, lambda: self._check_aborted(client, left_s))
        self.clock.call_later(CANCEL_REACHES_ENGINE_S, lambda: self._check_cancelled(client))

    def _check_cancelled(self, client: Client) -> None:
        if not client.over:
            self.violated(f"{client.request} has not ended though its client left")

    def _check_aborted(self, client: Client, left_s: float) -> None:
        now_s = self.clock.now()
        if any(start_s <= now_s and left_s <= end_s + 1.0 for start_s, end_s in self._bus_down_s) or not self.net.up:
            return
        gateway = self.gateways.get(client.gateway)
        if gateway is None or gateway.paused_until_s > left_s:
            return  # A gateway that is away says nothing; its silence ends the request a little later.
        for node in self.replicas.values():
            reached = node.paused_until_s < left_s and node.connected and node.back_s < left_s
            if reached and any(request == client.request for request, _ in node.holds):
                self.violated(f"{client.request} still runs on {node.replica} {now_s - left_s:.1f} s after its client left")

    def _arrivals(self, until_s: float) -> None:
        def arrive() -> None:
            if self.clock.now() >= until_s:
                return
            self._one_request()
            self.clock.call_later(self.draw.expovariate(self.options.request_rate), arrive)

        self.clock.call_later(self.draw.expovariate(self.options.request_rate), arrive)

    def _one_request(self, model: ModelRecord | None = None) -> Client | None:
        draw = self.draw
        weights = [1.0 / (index + 1) for index in range(len(self.records))]
        model = model or draw.choices(self.records, weights)[0]
        choices = 3 if draw.random() < 0.1 else 1
        tokens = draw.choice((1, 5, 20, 60))
        pages = draw.choice((8, 8, 20, 100)) if draw.random() < 0.95 else 550
        client = self.submit(
            model,
            tokens=tokens,
            pages=pages,
            choices=choices,
            sla_class=draw.choice((SlaClass.GOLD, SlaClass.SILVER, SlaClass.SILVER, SlaClass.BATCH)),
        )
        leaves = 0.4 if "clients-leave" in self.options.faults else 0.0
        if client is not None and draw.random() < leaves:
            self.clock.call_later(draw.expovariate(1.0), lambda: self.leave(client))
        return client

    # ---- faults

    def _schedule_faults(self) -> None:
        for fault in self.options.faults:
            for _ in range(self.draw.randint(1, 3)):
                at_s = self.draw.uniform(1.0, CHAOS_S - 2.0)
                self.clock.call_later(at_s, lambda fault=fault: self._fault(fault))  # type: ignore[misc]

    def _fault(self, fault: str) -> None:
        actions: dict[str, Callable[[], None]] = {
            "replica-killed": self._kill_replica,
            "replica-killed-while-claiming": self._kill_next_claimers,
            "replica-frozen": self._freeze_replica,
            "replica-cut-off": self._cut_off_replica,
            "engine-dies": self._doom_engines,
            "agent-killed": self._kill_agent,
            "agent-frozen": self._freeze_agent,
            "scheduler-paused": self._pause_scheduler,
            "scheduler-restarted": self._restart_scheduler,
            "leader-replaced": self._replace_leader,
            "gateway-restarted": self._restart_gateway,
            "gateway-paused": self._pause_gateway,
            "bus-restarted-streams-lost": lambda: self._bus_outage(streams_lost=True),
            "bus-blip": lambda: self._bus_outage(streams_lost=False),
            "loads-fail": self._fail_loads,
            "loads-slow": self._slow_loads,
            "burst": self._burst,
            "unload-asked": self._ask_unload,
            "load-by-hand": self._load_by_hand,
            "clients-leave": lambda: None,
            "client-leaves-cold-model": self._leave_cold_model,
        }
        actions[fault]()

    def _some_replica(self) -> ReplicaNode | None:
        busy = [node for node in self.replicas.values() if node.holds]
        found = busy or list(self.replicas.values())
        return self.draw.choice(found) if found else None

    def _kill_replica(self) -> None:
        node = self._some_replica()
        if node is not None:
            self.happened("replica-killed")
            node.exit(-9)

    def _kill_next_claimers(self) -> None:
        self._kill_claimers_left += 2

    def _freeze_replica(self) -> None:
        node = self._some_replica()
        if node is not None:
            self.happened("replica-frozen")
            node.pause(self.draw.choice((0.5, 1.5, 6.0)))

    def _cut_off_replica(self) -> None:
        node = self._some_replica()
        if node is not None and node.connected:
            self.happened("replica-cut-off")
            self.net.cut_off(node, self.draw.choice((0.5, 2.5, 5.0)))

    def _doom_engines(self) -> None:
        self._engine_deaths_left += 1

    def _kill_agent(self) -> None:
        if self.agents:
            agent = self.draw.choice(list(self.agents.values()))
            self.happened("agent-killed")
            del self.agents[agent.worker]
            agent.kill()
            self.clock.call_later(self.draw.uniform(0.5, 5.0), lambda: self._start_agent(agent.host))

    def _freeze_agent(self) -> None:
        """SIGSTOP of an agent: its replicas go on, and are counted as dead when it is silent for too long."""
        if self.agents:
            self.happened("agent-frozen")
            self.draw.choice(list(self.agents.values())).pause(self.draw.choice((0.5, 2.6, 4.0)))

    def _pause_scheduler(self) -> None:
        if self.schedulers:
            self.happened("scheduler-paused")
            self.schedulers[-1].pause(self.draw.uniform(0.5, 8.0))

    def _restart_scheduler(self) -> None:
        self.happened("scheduler-restarted")
        for scheduler in self.schedulers:
            scheduler.die()
        self.schedulers.clear()
        self.clock.call_later(self.draw.uniform(0.2, 3.0), self._start_scheduler)

    def _replace_leader(self) -> None:
        """The leader is stopped, a standby takes the lease, and the old one wakes up and goes on as if it led."""
        if self.schedulers:
            self.happened("leader-replaced")
            self.schedulers[-1].pause(self.draw.uniform(2.0, 6.0))
            self.clock.call_later(1.3, self._start_scheduler)

    def _restart_gateway(self) -> None:
        if not self.gateways:
            return
        gateway = self.draw.choice(list(self.gateways.values()))
        self.happened("gateway-restarted")
        del self.gateways[gateway.ingress]
        gateway.die()
        for client in self.clients.values():
            if client.gateway == gateway.ingress and not client.over:
                client.lost_with_gateway = True
        index = int(base_name(gateway.ingress).removeprefix("gateway"))
        self.clock.call_later(self.draw.uniform(0.2, 2.0), lambda: self._start_gateway(index))

    def _pause_gateway(self) -> None:
        if self.gateways:
            self.happened("gateway-paused")
            self.draw.choice(list(self.gateways.values())).pause(self.draw.choice((0.5, 1.5, 4.0)))

    def _bus_outage(self, *, streams_lost: bool) -> None:
        if not self.net.up:
            return
        self.happened("bus-restarted-streams-lost" if streams_lost else "bus-blip")
        for_s = self.draw.choice((0.1, 1.0, 6.0))
        self._bus_down_s.append((self.clock.now(), self.clock.now() + for_s))
        self.net.go_down(streams_lost=streams_lost)
        self.clock.call_later(for_s, self.net.come_up)

    def _fail_loads(self) -> None:
        failing = self.draw.choice(self.records).deployment
        self._failing.add(failing)
        self.clock.call_later(self.draw.uniform(3.0, 10.0), lambda: self._failing.discard(failing))

    def _slow_loads(self) -> None:
        self._slow_factor = 8.0
        self.clock.call_later(self.draw.uniform(3.0, 10.0), self._speed_up)

    def _speed_up(self) -> None:
        self._slow_factor = 1.0

    def _burst(self) -> None:
        self.happened("burst")
        model = self.draw.choice(self.records)
        for _ in range(40):
            self._one_request(model)

    def _ask_unload(self) -> None:
        if self.schedulers:
            self.happened("unload-asked")
            scheduler, name = self.schedulers[-1], self.draw.choice(self.records).name
            scheduler.run(lambda: scheduler.feed(sch.UnloadRequested(name)))

    def _load_by_hand(self) -> None:
        """Somebody else sends a load under the leader's own epoch, whether it fits or not."""
        if self.agents:
            self.happened("load-by-hand")
            agent = self.draw.choice(list(self.agents.values()))
            command = LoadModel(
                operation=OperationId(f"by-hand-{self._incarnation()}"),
                epoch=max(self._epoch, agent.core.epoch_seen),
                device=self.draw.choice(agent.core.snapshot(self.clock.now()).devices).device,
                record=self.draw.choice(self.records),
                replica_name=f"by-hand-{self._incarnation()}",
            )
            agent.run(lambda: agent.commanded(command, lambda _: None))

    def _leave_cold_model(self) -> None:
        """Several clients wake one model, and some of them leave while it wakes (B1)."""
        served = {node.record.deployment for node in self.replicas.values()}
        cold = [record for record in self.records if record.deployment not in served] or self.records
        model = self.draw.choice(cold)
        for index in range(4):
            client = self.submit(model, tokens=5, pages=8)
            if client is not None and index % 2:
                self.clock.call_later(self.draw.uniform(0.05, self.options.load_s), lambda c=client: self.leave(c))  # type: ignore[misc]

    # ---- the run

    def run(self) -> Counter[str]:
        """Runs the seed; returns how often each kind of event occurred.

        Raises:
            Violation: safety or liveness was violated.
        """
        self._schedule_faults()
        self._arrivals(CHAOS_S)
        self.clock.run(CHAOS_S)
        if self.options.pressure:
            self._press()
        self._heal()
        self._settle()
        self._probe()
        self._check_idle()
        if self.net.lost:
            self.happened("message-lost")
        if self.last_digest is not None and any(entry.action == "evict" for entry in self.last_digest.timeline):
            self.happened("evicted")
        return self.seen

    def _heal(self) -> None:
        self.healed = True
        self.net.loss = 0.0
        self._failing.clear()
        self._slow_factor = 1.0
        self._engine_deaths_left = self._kill_claimers_left = 0
        # What was begun (restarts, pauses, outages) ends within this time.
        self.clock.run(self.clock.now() + 10.0)
        assert self.net.up and len(self.agents) == self.options.hosts and len(self.gateways) == self.options.gateways

    def _press(self) -> None:
        """One model under more small requests than it can serve, and one large request that needs all of its pages."""
        self.happened("pressure")
        start_s = self.clock.now()
        model = self.records[-1]
        small_s = 1.0 / 16.0

        def small() -> None:
            if self.clock.now() < start_s + 60.0:
                self.submit(model, tokens=20, pages=60)
                self.clock.call_later(small_s, small)

        small()
        self.clock.run(start_s + 5.0)
        large = self.submit(model, tokens=5, pages=590, sla_class=SlaClass.GOLD)
        self.clock.run(start_s + 60.0)
        if large is not None and not large.over and not large.starts and not self.options.faults:
            self.violated(
                f"{large.request}, a large one, waited {self.clock.now() - large.submitted_s:.0f} s beside small ones"
            )

    def _settle(self) -> None:
        until_s = self.clock.now() + SETTLE_S_MAX
        self.clock.run(until_s, stop=lambda: all(client.over for client in self.clients.values()))
        open_ones = [client for client in self.clients.values() if not client.over]
        if open_ones:
            self.violated(f"{len(open_ones)} requests never ended, the first is {open_ones[0].request}")

    def _probe(self) -> None:
        """Every model answers again; a refusal after failed loads may be met some times, as a client would."""
        for record in self.records:
            until_s = self.clock.now() + PROBE_S_MAX
            while True:
                client = self.submit(record, tokens=3, pages=8)
                assert client is not None
                self.clock.run(until_s, stop=lambda client=client: client.over)  # type: ignore[misc]
                if isinstance(client.outcome, req.Finished):
                    break
                if self.clock.now() + 5.0 > until_s:
                    self.violated(f"{record.name} does not answer after all faults: {client.outcome}")
                self.clock.run(self.clock.now() + 5.0)

    def _check_idle(self) -> None:
        """Nothing is held anywhere once the gateways have said so."""
        self.clock.run(self.clock.now() + 8.0)
        for gateway in self.gateways.values():
            if not gateway.core.idle:
                self.violated(f"{gateway.name} still holds something")
        for node in self.replicas.values():
            if node.core.held or node.engine.running or node.engine.waiting or node.holds:
                self.violated(f"{node.name} still holds something")
            if node.engine.kv_pages_free != node.profile.kv_pages:
                self.violated(f"{node.name} leaks KV pages")
        # Tickets of a gateway that is gone leave with their fifth delivery or their TTL; those of a live one at once.
        stored = self.net.queue._tickets.values() if self.net.queue is not None else ()
        left = [ticket for ticket in (decode(each.payload, Ticket) for each in stored) if ticket.ingress in self.gateways]
        if left:
            self.violated(f"{len(left)} tickets are left on the work-queue, the first of {left[0].request}")
        assert math.isfinite(self.clock.now())


def run_seed(seed: int) -> Counter[str]:
    """Runs one seed from its options to its last check."""
    return World(seed).run()
