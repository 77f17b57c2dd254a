"""A pool in fluid form for tests of policies: views are built by hand, and what is decided happens at once or after a load.

Requests are rates: a model's ready replicas serve what they can of what arrives and waits, each with an equal part of its
devices' time. Every action is checked when it is carried out: what it names must be there. What the scheduler would drop is
dropped here too, and kept with the reason.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from broker.core.plan.policy import (
    Action,
    Arrivals,
    Decision,
    DeviceView,
    ModelView,
    Policy,
    PoolView,
    ReplicaView,
    ResizeReplicaKv,
    SetReplicaConcurrency,
    StartReplica,
    StopReplica,
)
from broker.core.pool.catalogue import DeviceKey
from ops.simulator.models import sim_model
from profiles.costs import length_class, prefill_s
from subjects.ids import DeploymentKey, DeviceId, ReplicaId, WorkerId
from subjects.messages import DeviceKind, ModelRecord, ReplicaState

GB = 1_000_000_000
DEVICE_BYTES = 72 * GB
KIND = "h100-80gb"
TICK_S = 0.2
INPUT_TOKENS, OUTPUT_TOKENS = 400, 400
TOKEN_S = 0.03
"""Per token of an answer that runs."""


@dataclass
class Replica:
    """One that exists."""

    replica: ReplicaId
    model: DeploymentKey
    devices: tuple[DeviceKey, ...]
    kv_bytes: int
    since_s: float
    ready_s: float
    slots: int
    stays: bool = False
    weight: float = 1.0
    running: int = 0
    ends_s: float | None = None
    """When it is gone, once it drains."""
    yields: bool = False
    """Whether it leaves for a newcomer that waits for its memory."""


@dataclass
class Model:
    """A model and its load."""

    record: ModelRecord
    rps: Callable[[float], float]
    input_tokens: int = INPUT_TOKENS
    output_tokens: int = OUTPUT_TOKENS
    may_load: bool = True
    load_s: float = 3.0
    due: float = 0.0
    waiting: float = 0.0
    waits_since_s: float = 0.0
    served: float = 0.0

    @property
    def life_s(self) -> float:
        """How long a request runs."""
        return self.output_tokens * TOKEN_S

    @property
    def work_s(self) -> float:
        """Of a replica's time, for one request."""
        costs = self.record.costs[KIND]
        token_s = costs.step_request_s + costs.step_context_token_s * (self.input_tokens + self.output_tokens / 2)
        return prefill_s(costs, self.input_tokens) + self.output_tokens * token_s


def model(size: str, name: str, rps: Callable[[float], float] | float, **changes: object) -> Model:
    """A model of one of the simulator's sizes. ``changes`` are its record's."""
    import msgspec

    made = sim_model(size, name)
    record = msgspec.structs.replace(made.record(made.kv_bytes_alone()), **changes)
    return Model(record, rps if callable(rps) else lambda _now_s: rps)


@dataclass
class Done:
    """An action, and when it was decided."""

    at_s: float
    action: Action


@dataclass
class FluidPool:
    """Advances by :meth:`run`."""

    policy: Policy
    models: list[Model]
    devices: int
    residents_max: int = 4
    now_s: float = 1000.0
    replicas: dict[ReplicaId, Replica] = field(default_factory=dict)
    gone: set[DeviceKey] = field(default_factory=set)
    """Devices that may take no work: draining, locked or not there."""
    acts: bool = True
    """False: people only want to see what would be done."""
    done: list[Done] = field(default_factory=list)
    dropped: list[tuple[str, Action]] = field(default_factory=list)
    """What could not be done, and why not."""
    views: list[PoolView] = field(default_factory=list)
    decisions: list[Decision] = field(default_factory=list)
    device_s: float = 0.0
    """Time of devices that held something."""
    number: int = 0

    def key(self, device: int) -> DeviceKey:
        """A device by its number."""
        return (WorkerId("w"), DeviceId(f"gpu{device:02d}"))

    def there(self, which: Model, *devices: int, kv_gb: float = 5.0, stays: bool = False, age_s: float = 100.0) -> Replica:
        """A replica that is ready from the start."""
        return self._add(which, tuple(map(self.key, devices)), int(kv_gb * GB), self.now_s - age_s, stays=stays)

    def _add(
        self, which: Model, devices: tuple[DeviceKey, ...], kv_bytes: int, ready_s: float, *, stays: bool = False
    ) -> Replica:
        self.number += 1
        name = ReplicaId(f"{which.record.name}-{self.number:04d}")
        slots = which.record.max_num_seqs
        replica = Replica(name, which.record.deployment, devices, kv_bytes, min(self.now_s, ready_s), ready_s, slots, stays)
        self.replicas[name] = replica
        assert all(self.free_bytes(device) >= 0 for device in devices)
        return replica

    def of(self, which: Model, *, ready: bool = False) -> list[Replica]:
        """A model's replicas that nobody has told to leave."""
        return [
            replica
            for replica in self.replicas.values()
            if replica.model == which.record.deployment
            and replica.ends_s is None
            and (not ready or replica.ready_s <= self.now_s)
        ]

    def in_use(self) -> set[DeviceKey]:
        """Devices that hold something."""
        return {device for replica in self.replicas.values() for device in replica.devices}

    def model_of(self, replica: Replica) -> Model:
        """Whose it is."""
        return next(one for one in self.models if one.record.deployment == replica.model)

    def budget_bytes(self, replica: Replica) -> int:
        """Of each of its devices."""
        record = self.model_of(replica).record
        return -(-record.weights_bytes // record.gpus) + record.overhead_bytes + -(-replica.kv_bytes // record.gpus)

    def free_bytes(self, device: DeviceKey) -> int:
        """What nobody holds."""
        held = [r for r in self.replicas.values() if device in r.devices and not r.yields]
        return DEVICE_BYTES - sum(map(self.budget_bytes, held))

    # ------------------------------------------------------------------------------------------------------------- time

    def run(self, seconds: float) -> None:
        """So many seconds of ticks; each builds a view, asks and obeys."""
        for _ in range(round(seconds / TICK_S)):
            self.now_s = round(self.now_s + TICK_S, 6)
            self._serve()
            view = self.view()
            decision = self.policy.decide(self.now_s, view)
            self.views.append(view)
            self.decisions.append(decision)
            for replica, weight in decision.weights.items():
                self.replicas[replica].weight = weight
            for action in decision.actions:
                refusal = self._obey(action)
                if refusal:
                    self.dropped.append((refusal, action))
                else:
                    self.done.append(Done(self.now_s, action))

    def _serve(self) -> None:
        for name in [r.replica for r in self.replicas.values() if r.ends_s is not None and r.ends_s <= self.now_s]:
            del self.replicas[name]
        self.device_s += TICK_S * len(self.in_use())
        for one in self.models:
            one.due += one.rps(self.now_s) * TICK_S
            arrived = int(one.due)
            one.due -= arrived
            self._arrived[one.record.deployment] = arrived
            if not one.waiting:
                one.waits_since_s = self.now_s
            one.waiting += arrived
            open_ = [r for r in self.of(one, ready=True) if r.weight > 0]
            parts = [self._share(replica) for replica in open_]
            one.served = min(one.waiting, sum(parts) / one.work_s * TICK_S)
            one.waiting -= one.served
            fade = min(1.0, TICK_S / one.life_s)
            self._running[one.record.deployment] = (
                self._running.get(one.record.deployment, 0.0) * (1 - fade) + one.served / TICK_S * one.life_s * fade
            )
            for replica in self.of(one, ready=True):
                replica.running = 0
            for replica, part in zip(open_, parts, strict=True):
                replica.running = round(self._running[one.record.deployment] * part / sum(parts))

    _arrived: dict[DeploymentKey, int] = field(default_factory=dict)
    _running: dict[DeploymentKey, float] = field(default_factory=dict)

    def _share(self, replica: Replica) -> float:
        """Of its devices' time less what its steps always take; neighbours that have nothing to do leave theirs."""
        beside = max(
            sum(device in other.devices and (other is replica or other.running > 0) for other in self.replicas.values())
            for device in replica.devices
        )
        return 0.85 / beside

    def _obey(self, action: Action) -> str:
        """Carries it out; returns why not, if the scheduler would drop it."""
        assert action.reason
        match action:
            case StartReplica():
                one = next(m for m in self.models if m.record.deployment == action.deployment)
                victims = [self._known(victim) for victim in action.victims]
                assert not self.gone & set(action.devices)
                for victim in victims:
                    assert not victim.stays and victim.ends_s is None and victim.ready_s <= self.now_s
                assert len(set(action.devices)) == one.record.gpus
                kv_bytes = one.record.kv_bytes if action.kv_bytes is None else action.kv_bytes
                if not one.may_load:
                    return "may not load"
                if len(self.of(one)) >= one.record.max_replicas:
                    return "most"
                begins_s = self.now_s
                for victim in victims:
                    life_s = self.model_of(victim).life_s if victim.running else 0.4
                    victim.yields, victim.ends_s = True, self.now_s + life_s
                    begins_s = max(begins_s, victim.ends_s)
                added = self._add(one, action.devices, kv_bytes, begins_s + one.load_s)
                if any(self.free_bytes(device) < 0 for device in action.devices):
                    assert not victims
                    del self.replicas[added.replica]
                    return "memory"
            case StopReplica():
                replica = self._known(action.replica)
                assert not replica.stays and replica.ends_s is None
                life_s = self.model_of(replica).life_s
                replica.ends_s = self.now_s + (0.4 if action.interrupt or not replica.running else life_s)
            case ResizeReplicaKv():
                replica = self._known(action.replica)
                assert replica.ready_s <= self.now_s and action.kv_bytes > 0
                if replica.ends_s is not None:
                    return "leaves"
                before, replica.kv_bytes = replica.kv_bytes, action.kv_bytes
                if any(self.free_bytes(device) < 0 for device in replica.devices):
                    replica.kv_bytes = before
                    return "memory"
            case SetReplicaConcurrency():
                replica = self._known(action.replica)
                assert action.slots > 0 and replica.ends_s is None
                replica.slots = action.slots
        return ""

    def _known(self, name: ReplicaId) -> Replica:
        """One that an action may name."""
        replica = self.replicas[name]
        assert not self.gone & set(replica.devices)
        return replica

    # ------------------------------------------------------------------------------------------------------------- views

    def view(self) -> PoolView:
        """What the policy may know now."""
        devices = {
            key: DeviceView(
                key=key,
                kind=DeviceKind.GPU,
                device_type=KIND,
                link="nv0",
                memory_bytes=DEVICE_BYTES,
                free_planned_bytes=self.free_bytes(key),
                largest_free_bytes=self.free_bytes(key),
                loads_coming=sum(r.ready_s > self.now_s and key in r.devices for r in self.replicas.values()),
                busy_s=0.0,
            )
            for key in map(self.key, range(self.devices))
            if key not in self.gone
        }
        models = {one.record.deployment: self._model(one) for one in self.models}
        return PoolView(self.now_s, dict(sorted(models.items())), devices, self.residents_max)

    def _model(self, one: Model) -> ModelView:
        arrived = self._arrived.get(one.record.deployment, 0)
        place = length_class(one.input_tokens)

        def by_class(count: int) -> tuple[int, int, int]:
            first, second, third = (count if place == number else 0 for number in range(3))
            return (first, second, third)

        open_ = self.of(one)
        waiting = int(one.waiting)
        finished = round(one.served)
        return ModelView(
            record=one.record,
            replicas=tuple(sorted(map(self._replica, open_), key=lambda view: view.replica)),
            leaving=sum(r.model == one.record.deployment and r.ends_s is not None for r in self.replicas.values()),
            waiting=waiting,
            waiting_input_tokens=waiting * one.input_tokens,
            running=sum(replica.running for replica in open_),
            oldest_wait_s=self.now_s - one.waits_since_s if waiting else 0.0,
            arrivals=Arrivals(
                by_class(arrived), by_class(arrived * one.input_tokens), by_class(arrived * one.output_tokens)
            ),
            finished=finished,
            within_slo=finished,
            load_s=one.load_s,
            may_load=one.may_load,
            may_act=self.acts,
            advises=not self.acts,
            finished_output_tokens=finished * one.output_tokens,
        )

    def _replica(self, replica: Replica) -> ReplicaView:
        one = self.model_of(replica)
        pages = replica.kv_bytes // (one.record.kv_bytes_per_token * one.record.block_size)
        used = min(pages, replica.running * -(-(one.input_tokens + one.output_tokens) // one.record.block_size))
        ready = replica.ready_s <= self.now_s
        return ReplicaView(
            replica=replica.replica,
            deployment=replica.model,
            devices=replica.devices,
            state=ReplicaState.READY if ready else ReplicaState.LOADING,
            since_s=replica.ready_s if ready else replica.since_s,
            budget_bytes=self.budget_bytes(replica),
            kv_bytes=replica.kv_bytes,
            running=replica.running,
            slots=replica.slots if ready else 0,
            kv_pages=pages if ready else 0,
            kv_pages_free=pages - used if ready else 0,
            last_used_s=self.now_s,
            stays=replica.stays,
        )

    # ---------------------------------------------------------------------------------------------------------- reading

    def starts(self, which: Model | None = None, after_s: float = 0.0) -> list[StartReplica]:
        """Replicas that were started."""
        return [
            done.action
            for done in self.done
            if isinstance(done.action, StartReplica)
            and done.at_s > after_s
            and (which is None or done.action.deployment == which.record.deployment)
        ]

    def stops(self, after_s: float = 0.0) -> list[StopReplica]:
        """Replicas that were stopped."""
        return [done.action for done in self.done if isinstance(done.action, StopReplica) and done.at_s > after_s]
