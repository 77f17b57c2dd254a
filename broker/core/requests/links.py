"""Which requests go straight to a replica, without ticket and claim (ops/decisions/0026).

A replica says with its frames what it would take of this gateway at once, less what its open pulls were promised.
A new request is handed to the replica with the most room, unless one of its lane waits in the queue. Where there is no
room it is parked here for a while, since the next word may bring some; then it goes to the queue. The queue is also where
replicas are met: while there is one that we have not heard from, nobody is parked.

Where the prefix of a request is known to be (``kvcache.core.prefix_index``), :mod:`broker.core.requests.affinity` chooses
among the replicas with room. It may also park a request for the one that has its prefix while another has room; such a one
overtakes nobody and holds up nobody.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from math import inf

from broker.core.requests.affinity import NOWHERE, Choice, Place, choose
from broker.core.requests.events import PARK_S, PARK_S_MAX
from broker.core.requests.live import QUEUED, LiveRequest, State
from kvcache.core.prefix_index import NOBODY, PrefixHolders, PrefixIndex
from subjects.ids import DeploymentKey, ReplicaId, RequestId, WorkerId
from subjects.messages import Room, SlaClass

SILENT_HELD_MAX = 1
"""After more ``Held`` without a frame a replica is handed nothing more."""


@dataclass(slots=True)
class Link:
    """What this gateway knows of a replica that has, or just had, requests of it. ``running`` keeps the order of grants.

    ``room`` is its latest word, ``hands`` the number of what was handed to it last, and ``unseen`` is what that word does
    not know of: number, KV pages and prompt tokens of each.
    """

    running: dict[RequestId, None] = field(default_factory=dict)
    awaiting_frame: bool = False
    unanswered: int = 0
    linger_until_s: float = 0.0
    hands: int = 0
    room: Room | None = None
    spoke_s: float = -inf
    adapters: bool = False
    """Whether its last claim said that it heeds the adapter of a grant."""
    unseen: deque[tuple[int, int, int]] = field(default_factory=deque)
    weight: float = 1.0
    """Its share of the work, by the pool's digest: a replica of half the weight should hold half as much."""

    @property
    def load(self) -> float:
        """What it holds of ours for its weight."""
        return len(self.running) / self.weight if self.weight > 0 else inf

    def heard(self) -> None:
        """A frame or a claim came from it."""
        self.unanswered = 0
        self.awaiting_frame = False

    def room_is(self, now_s: float, room: Room | None) -> None:
        """The replica's word, in the order in which it gave it."""
        self.spoke_s = now_s
        self.room = room
        while room is not None and self.unseen and self.unseen[0][0] <= room.hands:
            self.unseen.popleft()

    def takes(self, live: LiveRequest) -> bool:
        """Whether it could be handed such a request at all; whether it has room for it is another matter."""
        return self.room is not None and self.unanswered <= SILENT_HELD_MAX and (self.adapters or live.adapter is None)

    def slots_for(self, pages: int) -> int:
        """How many requests it would take, the first of them with so many pages; 0 when it would not take that one."""
        room = self.room
        if room is None:
            return 0
        slots, pages_left, tokens = room.slots - len(self.unseen), room.pages, room.tokens
        for _, other_pages, other_tokens in self.unseen:
            pages_left -= other_pages
            tokens -= other_tokens
        return slots if pages <= pages_left and tokens > 0 else 0


def _place(replica: ReplicaId, worker: WorkerId | None, slots: int, link: Link, held_out: dict[ReplicaId, int]) -> Place:
    unseen_tokens = sum(tokens for _, _, tokens in link.unseen) if link.unseen else 0
    return Place(replica, worker, slots, link.load, unseen_tokens, held_out.get(replica, 0) if held_out else 0)


class Links:
    """The links of one gateway, and who may be handed to which of them."""

    def __init__(self, prefixes: PrefixIndex | None = None) -> None:
        self._prefixes = prefixes
        self.links: dict[ReplicaId, Link] = {}
        self._serving: dict[DeploymentKey, dict[ReplicaId, Link]] = {}
        self._queued: dict[tuple[DeploymentKey, str], tuple[int, float]] = {}
        """By model and lane: how many wait in the queue, and since when it has not been empty."""
        self._parked: dict[tuple[DeploymentKey, str], dict[RequestId, None]] = {}
        """By model and class, in order of arrival."""
        self._held_out: dict[DeploymentKey, dict[RequestId, ReplicaId]] = {}
        """Of the parked: who waits for one replica though another had room."""
        self._handed = 0
        self._ready: dict[DeploymentKey, dict[ReplicaId, float]] = {}
        """With their weights, as the pool's digest has it."""

    # ---------------------------------------------------------------------------------------------------------- links

    def link(self, replica: ReplicaId) -> Link:
        """Its link, a new one if need be."""
        found = self.links.get(replica)
        if found is None:
            found = self.links[replica] = Link()
            for weights in self._ready.values():
                found.weight = weights.get(replica, found.weight)
        return found

    def serves(self, replica: ReplicaId, model: DeploymentKey) -> None:
        """It got a request of this model."""
        self._serving.setdefault(model, {})[replica] = self.link(replica)

    def ready_are(self, ready: dict[DeploymentKey, dict[ReplicaId, float]]) -> None:
        """The replicas that serve and take new requests, by model, each with its weight. One that we have no link to may
        have room, but only the queue reaches it."""
        self._ready = ready
        weights = {replica: weight for of_model in ready.values() for replica, weight in of_model.items()}
        for replica, link in self.links.items():
            link.weight = weights.get(replica, link.weight)

    def models_of(self, replica: ReplicaId) -> list[DeploymentKey]:
        """What it is known to serve: one model, as replicas are."""
        return [model for model, serving in self._serving.items() if replica in serving]

    def forget(self, replica: ReplicaId) -> Link | None:
        """It is dead, or has nothing of ours any more."""
        for model in self.models_of(replica):
            del self._serving[model][replica]
            if not self._serving[model]:
                del self._serving[model]
        return self.links.pop(replica, None)

    # ------------------------------------------------------------------------------------------------------- requests

    def moved(self, now_s: float, live: LiveRequest, state: State | None) -> None:
        """A request is about to change its state."""
        change = (state in QUEUED) - (live.state in QUEUED)
        if change:
            lane = (live.profile.deployment, live.profile.lane._value_)
            count, since_s = self._queued.pop(lane, (0, now_s))
            if count + change:
                self._queued[lane] = (count + change, since_s)
        if live.state is State.PARKED:
            parked = self._parked[live.parks_as]
            del parked[live.request]
            if not parked:
                del self._parked[live.parks_as]
            self.holds_out(live, None)
        if state is State.PARKED:
            self._parked.setdefault(live.parks_as, {})[live.request] = None

    def can_be_handed(self, live: LiveRequest) -> bool:
        """Whether one message holds it whole, and a replica takes it in hand."""
        serving = self._serving.get(live.profile.deployment)
        return serving is not None and live.grant_parts() == 1 and any(link.takes(live) for link in serving.values())

    def may_park(self, now_s: float, live: LiveRequest) -> bool:
        """Whether its model has no replica but those that we hear from, so that nobody could serve it sooner, and its lane
        has no queue that lasts: in such a one it takes its place at once."""
        count, since_s = self._queued.get((live.profile.deployment, live.profile.lane._value_), (0, now_s))
        if count and now_s - since_s > PARK_S_MAX:
            return False
        return self._knows_all(live.profile.deployment)

    def pick(self, now_s: float, live: LiveRequest) -> Choice:
        """Where it goes: of the replicas with room for it the one that holds least for its weight, of equals the one with
        most room, then the one known first; or as its prefix would have it. Nowhere while others of its lane are queued, nor
        where all that we know are at work beside a replica that serves and has nothing of ours: the queue reaches it."""
        if (live.profile.deployment, live.profile.lane._value_) in self._queued:
            return NOWHERE
        holders = self._holders_for(live)
        if holders is not NOBODY:
            return self._pick_by_prefix(now_s, live, holders)
        pages = live.profile.kv_pages_needed
        best, picked = (inf, 0), None
        for replica, link in self._serving.get(live.profile.deployment, {}).items():
            slots = link.slots_for(pages) if link.takes(live) else 0
            if slots and (link.load, -slots) < best:
                best, picked = (link.load, -slots), replica
        if picked is None or (best[0] and not self._knows_all(live.profile.deployment)):
            return NOWHERE
        return Choice(None, picked)

    def _knows_all(self, model: DeploymentKey) -> bool:
        return all(replica in self.links for replica in self._ready.get(model, ()))

    def _holders_for(self, live: LiveRequest) -> PrefixHolders:
        if live.prefix is None or self._prefixes is None or self._prefixes.empty:
            return NOBODY
        return self._prefixes.holders(live.profile.model_hash, live.prefix.spans)

    def _pick_by_prefix(self, now_s: float, live: LiveRequest, holders: PrefixHolders) -> Choice:
        assert live.prefix is not None and self._prefixes is not None
        index, pages, model = self._prefixes, live.profile.kv_pages_needed, live.profile.deployment
        serving = self._serving.get(model, {})
        held_out: dict[ReplicaId, int] = {}
        for request, replica in self._held_out.get(model, {}).items():
            if request != live.request:
                held_out[replica] = held_out.get(replica, 0) + 1
        near = {replica: one.worker for one in holders.workers for replica in index.replicas_at(one.worker)}
        engines = holders.replicas
        places: list[Place] = []
        # Engines that have nothing of it are alike but for what their worker keeps. Of each kind the one with the least to
        # do is enough, or where none has room the one that ends something first.
        free: dict[WorkerId | None, tuple[float, int, ReplicaId, Link]] = {}
        full: dict[WorkerId | None, tuple[float, ReplicaId, Link]] = {}
        for replica, link in serving.items():
            if not link.takes(live):
                continue
            slots = link.slots_for(pages)
            if replica in engines:
                places.append(_place(replica, index.worker_of(replica), slots, link, held_out))
                continue
            kind = near.get(replica)
            load = link.load + len(link.unseen) / (link.weight or 1.0)
            if slots:
                best = free.get(kind)
                if best is None or load < best[0] or (load == best[0] and slots > best[1]):
                    free[kind] = (load, slots, replica, link)
            elif kind is not None and (kind not in full or load > full[kind][0]):
                full[kind] = (load, replica, link)
        places += [_place(replica, kind, slots, link, held_out) for kind, (_, slots, replica, link) in free.items()]
        places += [_place(replica, kind, 0, link, held_out) for kind, (_, replica, link) in full.items() if kind not in free]
        # One that serves and has nothing of ours counts as idle: where it would be best, the queue reaches it.
        unknown = [replica for replica in self._ready.get(model, ()) if replica not in self.links]
        places += [Place(replica, near.get(replica), 1, 0.0, 0, 0) for replica in unknown]
        wait_s_max = PARK_S - (now_s - live.waits_since_s) if live.may_hold_out else 0.0
        tokens = live.profile.expected_output_tokens
        choice = choose(places, holders, live.prefix, output_tokens=tokens, wait_s_max=wait_s_max)
        return NOWHERE if choice.replica in unknown else choice

    def goes_to(self, replica: ReplicaId, live: LiveRequest) -> None:
        """A replica has it, one way or another: its engine keeps this prefix longest."""
        if live.prefix is not None and self._prefixes is not None and not self._prefixes.empty:
            self._prefixes.used(live.profile.model_hash, replica, live.prefix.spans)

    def book(self, replica: ReplicaId, live: LiveRequest) -> int:
        """Counts what is handed to a replica against its room; returns the number of the hand."""
        self._handed += 1
        link = self.links[replica]
        link.hands = self._handed
        link.unseen.append((self._handed, live.profile.kv_pages_needed, live.profile.input_tokens))
        return self._handed

    # --------------------------------------------------------------------------------------------------------- parked

    @property
    def any_parked(self) -> bool:
        """Whether a request of any model is parked."""
        return bool(self._parked)

    def has_parked(self, model: DeploymentKey) -> bool:
        """Whether one would be overtaken: not one that could have gone elsewhere."""
        if not self._parked:
            return False
        parked = sum(len(self._parked.get((model, sla_class._value_), ())) for sla_class in SlaClass)
        return parked > len(self._held_out.get(model, ()))

    def holds_out(self, live: LiveRequest, replica: ReplicaId | None) -> None:
        """It is, or is about to be, parked for this replica though another has room; None: for any."""
        model = live.profile.deployment
        if replica is not None:
            self._held_out.setdefault(model, {})[live.request] = replica
            return
        held_out = self._held_out.get(model, {})
        if held_out.pop(live.request, None) is not None and not held_out:
            del self._held_out[model]

    def concerns(self, replica: ReplicaId, live: LiveRequest) -> bool:
        """Whether the word of this replica may be what a parked request waits for: its own, or one at the same worker."""
        waits_for = self.holds_out_for(live)
        if waits_for is None or waits_for == replica:
            return True
        worker = self._prefixes.worker_of(waits_for) if self._prefixes is not None else None
        return worker is not None and self._prefixes is not None and worker == self._prefixes.worker_of(replica)

    def holds_out_for(self, live: LiveRequest) -> ReplicaId | None:
        """For whom it is parked; None: for whoever has room first."""
        held_out = self._held_out.get(live.profile.deployment)
        return None if held_out is None else held_out.get(live.request)

    def parked(self, model: DeploymentKey) -> Iterator[RequestId]:
        """Who goes first when there is room: the highest class, of a class the oldest."""
        for sla_class in SlaClass:
            yield from list(self._parked.get((model, sla_class._value_), ()))

    def waits_in_vain(self, now_s: float, live: LiveRequest) -> bool:
        """Whether a parked request should go to the queue: a replica has spoken since and there was no room, none is left to
        speak, or it was parked for too long."""
        serving = self._serving.get(live.profile.deployment)
        if not serving or now_s - live.waits_since_s >= PARK_S_MAX:
            return True
        return any(link.spoke_s > live.waits_since_s for link in serving.values())
