"""Models take turns on a GPU between two tokens.

Source: Aegaeon (SOSP 2025): a GPU holds one model at a time and may change it at any token; new requests of one model are
prefilled together (grouped, first come first served), decoding goes round the models of an instance with a quota of time
each; models are spread over instances by their load. A change interrupts what runs; it goes on at its model's next turn
from the tokens already sent. Changing costs what the workload's ladder says for a load (Aegaeon reports under a second;
sweep the ladder to see it there). Set here: an instance takes models up to 80 % of its time, one that needs more than an
instance gets some for itself; a quota is twice a load, so that at most a third of the time goes into changes; how many
models share an instance is set by what the SLO allows: one less while fewer than 99 % of the finished requests met it, one
more after good minutes (two, and twice as many after each miss). Left out: separate instances for prefill and decoding, and
KV that is swapped to host memory and back (what was interrupted is prefilled again, which costs less than the load).
"""

from __future__ import annotations

from dataclasses import dataclass, field

from broker.core.plan import policy as p
from broker.core.pool.catalogue import DeviceKey
from ops.simulator.policies.common import Floor, Sizer, costs_of, needed
from ops.simulator.types import PolicyContext
from subjects.ids import DeploymentKey
from subjects.messages import ReplicaState

SPAN_S = 15.0
UTILISATION = 0.8
SURPLUS_S = 60.0
QUOTA_LOADS = 2.0
MEMBER_S = 60.0
"""A model stays on its instances' lists for so long after its last request."""
SHARED_MAX = 7
"""Models on one instance at most: what Aegaeon reports per GPU."""
REVIEW_S = 30.0
GOOD_REVIEWS = 4
PATIENCE_MAX = 64
GOAL = 0.99


@dataclass(slots=True)
class _Instance:
    """Devices that hold one replica at a time, and whose turn it is."""

    devices: tuple[DeviceKey, ...]
    members: list[DeploymentKey] = field(default_factory=list)
    """In order of turns."""
    current: DeploymentKey | None = None
    turn_s: float = 0.0
    """When the present turn began."""


class TokenSwap:
    """``token-swap``."""

    name = "token-swap"

    def __init__(self) -> None:
        self._sizers: dict[DeploymentKey, Sizer] = {}
        self._instances: list[_Instance] = []
        self._shared = 3
        self._reviewed_s = 0.0
        self._good = 0
        """Reviews in a row that met the goal."""
        self._patience = GOOD_REVIEWS
        self._finished = self._within = 0

    def decide(self, now_s: float, view: p.PoolView) -> p.Decision:
        """At every look: who is where, and whose turn it is."""
        for deployment, model in view.models.items():
            if deployment not in self._sizers:
                self._sizers[deployment] = Sizer(SPAN_S, UTILISATION, SURPLUS_S)
            self._sizers[deployment].see(now_s, model)
            self._finished += model.finished
            self._within += model.within_slo
        self._review(now_s)
        actions: list[p.Action] = []
        floor = Floor(view)
        self._spread(now_s, view, floor)
        for instance in self._instances:
            self._take_turns(now_s, view, instance, actions)
        for instance in [one for one in self._instances if not one.members]:
            self._instances.remove(instance)
            actions += [p.StopReplica(replica.replica, "nobody needs it") for replica in _on(view, instance)]
        return p.Decision(tuple(actions))

    def _review(self, now_s: float) -> None:
        """Fewer models per instance while the SLO is missed, more when it was met for long."""
        if now_s - self._reviewed_s < REVIEW_S:
            return
        self._reviewed_s = now_s
        if not self._finished:
            return
        met = self._within >= GOAL * self._finished
        self._finished = self._within = 0
        self._good = self._good + 1 if met else 0
        if not met:
            self._shared = max(1, self._shared - 1)
            self._patience = min(PATIENCE_MAX, 2 * self._patience)
        elif self._good >= self._patience:
            self._shared = min(SHARED_MAX, self._shared + 1)
            self._good = 0

    # ------------------------------------------------------------------------------------------------------- who is where

    def _spread(self, now_s: float, view: p.PoolView, floor: Floor) -> None:
        """Puts each active model on so many instances as it needs; those with much load have them for themselves."""
        shares: dict[DeploymentKey, float] = {}
        for deployment, model in view.models.items():
            sizer = self._sizers[deployment]
            sizer.size(now_s, model, costs_of(model, view))
            if now_s - sizer.seen_s < MEMBER_S:
                shares[deployment] = sizer.held()
        for instance in self._instances:
            instance.members = [member for member in instance.members if member in shares]
        for deployment in sorted(shares, key=lambda m: (-shares[m], m)):
            mine = [instance for instance in self._instances if deployment in instance.members]
            count = max(1, needed(shares[deployment], 1.0))
            for instance in sorted(mine, key=lambda one: (one.current == deployment, one.devices))[: len(mine) - count]:
                instance.members.remove(deployment)
            crowded = len(mine) == 1 and count == 1 and len(mine[0].members) > self._shared
            if crowded and min(mine[0].members, key=lambda m: (shares[m], m)) == deployment:
                mine[0].members.remove(deployment)  # Who has the least load looks for another place.
                mine = []
            for _ in range(count - len(mine)):
                place = self._place(view, deployment, shares, count, floor)
                if place is None:
                    break
                place.members.append(deployment)

    def _place(
        self, view: p.PoolView, deployment: DeploymentKey, shares: dict[DeploymentKey, float], count: int, floor: Floor
    ) -> _Instance | None:
        """An instance with time left, else new devices, else the one with the least to do."""
        record = view.models[deployment].record
        alike = [
            (sum(shares[m] for m in one.members), len(one.members), one.devices, one)
            for one in self._instances
            if len(one.devices) == record.gpus and deployment not in one.members
        ]
        alike.sort(key=lambda entry: entry[:3])
        open_to_it = [
            one
            for load, members, _, one in alike
            if not members or (count == 1 and members < self._shared and load + shares[deployment] <= 1.0)
        ]
        if open_to_it:
            return open_to_it[0]
        devices = floor.whole(record)
        if devices is not None:
            floor.take(devices, record.budget_bytes)
            self._instances.append(_Instance(devices))
            return self._instances[-1]
        return alike[0][3] if alike else None

    # ---------------------------------------------------------------------------------------------------------- whose turn

    def _take_turns(self, now_s: float, view: p.PoolView, instance: _Instance, actions: list[p.Action]) -> None:
        """The present model goes on while nobody else waits, or until its quota is used."""
        there = _on(view, instance)
        if any(replica.state is not ReplicaState.READY for replica in there):
            instance.turn_s = now_s
            return
        waiting = [m for m in instance.members if m != instance.current and self._needs(view, m, instance)]
        current = view.models.get(instance.current) if instance.current is not None else None
        if there and current is not None and instance.current in instance.members:
            busy = current.waiting > 0 or there[0].running > 0
            quota_s = QUOTA_LOADS * current.load_s
            if not waiting or (busy and now_s - instance.turn_s < quota_s):
                return
        elif there and not waiting:
            return  # It keeps what it has until somebody else wants it.
        elif not waiting:
            waiting = instance.members[:1]
        if not waiting:
            return
        # The one whose requests wait the longest; all of them are then prefilled together.
        turn = max(waiting, key=lambda m: (view.models[m].oldest_wait_s, -instance.members.index(m)))
        actions += [p.StopReplica(replica.replica, "its turn is over", interrupt=True) for replica in there]
        actions.append(p.StartReplica(turn, instance.devices, f"its turn, {len(instance.members)} share the instance"))
        instance.current, instance.turn_s = turn, now_s

    def _needs(self, view: p.PoolView, deployment: DeploymentKey, instance: _Instance) -> bool:
        """Whether a member has requests that nobody serves."""
        model = view.models[deployment]
        return bool(model.waiting) and not any(
            replica.devices != instance.devices and _has_room(replica) for replica in model.replicas
        )


def _has_room(replica: p.ReplicaView) -> bool:
    return replica.state is not ReplicaState.READY or replica.running < replica.slots


def _on(view: p.PoolView, instance: _Instance) -> list[p.ReplicaView]:
    models: list[p.ModelView] = list(view.models.values())
    return [replica for model in models for replica in model.replicas if replica.devices == instance.devices]


def token_swap(context: PolicyContext) -> TokenSwap:
    """Factory of ``token-swap``."""
    return TokenSwap()
