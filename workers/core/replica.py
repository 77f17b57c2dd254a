"""The replica's side of the request protocol (ops/decisions/0004), as a pure core.

It pulls tickets by capacity (:mod:`workers.core.pulling`), claims each from its gateway, takes what gateways hand over while
it has room (ops/decisions/0026), starts what is granted once the KV pages that it may need are free (KVC-6), and keeps
every token until the gateway has confirmed it. It never decides who runs what: a gateway's silence, ``Cancel`` or not naming
a request ends the request here, and an attempt that ended here never runs here again.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from math import ceil, inf
from typing import assert_never

from subjects import messages as m
from subjects.ids import IngressId, ReplicaId
from workers.core import replica_events as ev
from workers.core.held_request import HeldRequest, Key, Phase
from workers.core.pulling import BACKLOG_TOKENS_MAX, PullPlanner, room_for

BEAT_S = 0.1
"""How often unconfirmed deltas and silent gateways are looked for."""
LINK_IDLE_S = 5.0
"""A gateway with no requests here is forgotten when it has been silent for so long."""


@dataclass(slots=True)
class _Link:
    """What this replica knows of a gateway. ``heard_s`` is the last ``Held``, or when its only request was granted;
    ``sent_s`` the last frame; ``granted`` counts its requests that run or are not confirmed."""

    heard_s: float
    granted: int = 0
    hands: int = 0
    sent_s: float = -inf
    held_sequence: int = 0
    frames_sent: int = 0


class ReplicaCore:
    """Pulls by capacity, claims, runs, and sends each token until the gateway has confirmed it."""

    def __init__(self, replica: ReplicaId) -> None:
        self._replica = replica
        self._requests: dict[Key, HeldRequest] = {}
        self._links: dict[IngressId, _Link] = {}
        self._ended: OrderedDict[Key, float] = OrderedDict()
        self._planner = PullPlanner()
        self._active = self._pages_held = self._backlog_tokens = self._pages_started = 0
        """Sums of ``counted`` over what is held."""
        self._told_full: dict[IngressId, None] = {}
        """Gateways whose last word was that there is no slot, longest ago first."""
        self._waiting: dict[Key, HeldRequest] = {}
        """Granted, and waiting for pages (KVC-6), in the order of their grants."""
        self._gathering: dict[Key, HeldRequest] = {}
        self._gather_due_s = inf
        self._serving = False
        self._slots = 0
        self._kv_pages = 0
        self._block_size = 1
        self._draining = False
        self._drained = False
        self._share = 1.0
        self._drain_deadline_s = inf
        self._round_trip_s = -inf
        self._silence_counts_from_s = -inf
        self._beat_due_s = inf
        self._reported: ev.ReportLoad | None = None

    # ---------------------------------------------------------------------------------------------------------- views

    @property
    def next_wake_s(self) -> float | None:
        """When a ``Ticked`` is due, or None when nothing is."""
        pulling_s = self._planner.next_wake_s(pulling=self._serving and not self._draining and self._share > 0)
        drain_s = self._drain_deadline_s if self._draining and not self._drained else inf
        due_s = min(self._beat_due_s, self._gather_due_s, pulling_s, drain_s)
        return None if due_s == inf else due_s

    @property
    def held(self) -> int:
        """Requests that are being claimed, run, or are not confirmed yet."""
        return len(self._requests)

    @property
    def idle(self) -> bool:
        """Whether nothing is held and no gateway is known."""
        return not (self._requests or self._links)

    def _count(self, held: HeldRequest, *, dropped: bool = False) -> None:
        """Brings the sums up to date after ``held`` has changed."""
        active, pages, tokens, started = held.counted
        if dropped or held.phase is Phase.FINISHED:
            held.counted = (0, 0, 0, 0)
        else:
            with_engine = held.phase is Phase.RUNNING and held.waits is None
            held.counted = (1, held.pages, held.backlog_tokens, held.pages if with_engine else 0)
        self._active += held.counted[0] - active
        self._pages_held += held.counted[1] - pages
        self._backlog_tokens += held.counted[2] - tokens
        self._pages_started += held.counted[3] - started

    # ----------------------------------------------------------------------------------------------------------- step

    def step(self, now_s: float, event: ev.ReplicaEvent) -> list[ev.ReplicaCommand]:
        """Takes one event; returns what to do, in order."""
        out: list[ev.ReplicaCommand] = []
        self._do_what_is_due(now_s, out)
        match event:
            case ev.Opened():
                self._open(event)
            case ev.TicketPulled():
                self._planner.found(now_s, event.sla_class, event.lane)
                self._take_ticket(now_s, event.ticket, event.token, event.deliveries, out)
            case ev.PullExpired():
                self._planner.expired(now_s, event.sla_class, event.lane, event.credits)
            case ev.ClaimAnswered():
                self._claim_answered(now_s, event, out)
            case ev.ClaimUnanswered():
                self._claim_unanswered(event, out)
            case ev.HandReceived():
                self._take_hand(now_s, event.hand, out)
            case ev.EngineStepped():
                self._engine_stepped(now_s, event.deltas, out)
            case ev.EngineFailed():
                self._engine_failed(now_s, event.message, out)
            case ev.BackReceived():
                self._take_back(now_s, event.back, out)
            case ev.PoolChanged():
                self._planner.set_pool(event.weights, event.waiting)
                self._share = event.share
            case ev.ConcurrencySet():
                self._slots = event.slots
            case ev.KvResized():
                self._kv_pages = event.kv_pages
                self._planner.set_kv_pages(event.kv_pages)
            case ev.DrainStarted():
                self._draining = True
                self._drained = False
                self._drain_deadline_s = event.deadline_s
            case ev.BusReconnected():
                self._silence_counts_from_s = now_s + ev.RECONNECT_GRACE_S
                self._planner.rearm()
            case ev.BusRoundTripMade():
                if now_s - self._round_trip_s > ev.ROUND_TRIP_FRESH_S:
                    self._silence_counts_from_s = max(self._silence_counts_from_s, now_s)
                self._round_trip_s = now_s
            case ev.Ticked():
                pass
            case _:
                assert_never(event)
        self._settle(now_s, out)
        return out

    def _open(self, event: ev.Opened) -> None:
        self._serving = True
        self._draining = self._drained = False
        self._drain_deadline_s = inf
        self._slots = event.slots
        self._kv_pages = event.kv_pages
        self._block_size = event.block_size
        self._planner.open(kv_pages=event.kv_pages, block_size=event.block_size, max_context_len=event.max_context_len)

    def _do_what_is_due(self, now_s: float, out: list[ev.ReplicaCommand]) -> None:
        if self._draining and not self._drained and now_s >= self._drain_deadline_s:
            self._give_back(now_s, out)
        if now_s >= self._gather_due_s:
            self._send_gathered(now_s, out)
        if now_s >= self._beat_due_s:
            self._beat(now_s, out)
        while self._ended and next(iter(self._ended.values())) <= now_s:
            self._ended.popitem(last=False)

    def _settle(self, now_s: float, out: list[ev.ReplicaCommand]) -> None:
        """What follows from the state after any event: starts, pulls, the end of a drain, the load."""
        if self._waiting:
            self._start_what_fits(out)
        active, free_pages, backlog_tokens = self._active, self._kv_pages - self._pages_held, self._backlog_tokens
        self._planner.write_off(now_s)
        if self._serving and not self._draining and self._share > 0:
            # What others would serve sooner is left to them.
            free_slots = ceil(self._slots * self._share) - active
            out.extend(
                self._planner.plan(now_s, free_slots=free_slots, free_pages=free_pages, backlog_tokens=backlog_tokens)
            )
        if self._told_full:
            self._tell_of_room(now_s, out)
        if self._draining and not self._drained and not self._requests and not self._planner.outstanding:
            self._drained = True
            out.append(ev.ReportDrained(0))
        load = ev.ReportLoad(running=active, slots=self._slots, kv_pages_free=max(0, free_pages))
        if load != self._reported:
            self._reported = load
            out.append(load)
        if not (self._requests or self._links):
            self._beat_due_s = inf
        elif self._beat_due_s == inf:
            self._beat_due_s = now_s + BEAT_S

    # ------------------------------------------------------------------------------------------------ tickets, claims

    def _take_ticket(
        self, now_s: float, ticket: m.Ticket, token: str, deliveries: int, out: list[ev.ReplicaCommand]
    ) -> None:
        if not self._serving or self._drained:
            return  # Left to be redelivered to somebody who serves.
        key = (ticket.request, ticket.attempt)
        held = self._requests.get(key)
        if held is not None and held.phase is Phase.CLAIMING:
            held.tokens.append(token)
            held.deliveries = max(held.deliveries, deliveries)
        elif held is not None or key in self._ended:
            out.append(ev.AckTicket(token))
        else:
            held = self._begin_claim(ticket, out)
            held.tokens.append(token)
            held.deliveries = deliveries

    def _take_hand(self, now_s: float, hand: m.Hand, out: list[ev.ReplicaCommand]) -> None:
        """Begins what was handed over, or says at once that there is no room. A second copy of it changes nothing."""
        link = self._link(now_s, hand.ingress)
        link.hands = max(link.hands, hand.number)
        grant, pages = hand.grant, self._pages(hand.profile)
        key = (grant.request, grant.attempt)
        if key in self._requests:
            return
        room = room_for(self._slots - self._active, self._kv_pages - self._pages_held, pages, self._backlog_tokens)
        room = room and pages >= self._planner.aged_pages
        if not room or not self._serving or self._draining or self._share <= 0 or key in self._ended:
            self._remember(now_s, key)
            gone = m.Gone(request=grant.request, attempt=grant.attempt, full=True)
            self._send(now_s, hand.ingress, [], out, gone=(gone,))
            return
        held = HeldRequest(grant.request, grant.attempt, hand.ingress, hand.profile, pages)
        self._requests[held.key] = held
        self._begin(now_s, held, grant, out)

    def _word_of_room(self, ingress: IngressId, link: _Link) -> m.Room | None:
        room = self._room(link)
        self._told_full.pop(ingress, None)
        if room is not None and room.slots == 0:
            self._told_full[ingress] = None
        return room

    def _tell_of_room(self, now_s: float, out: list[ev.ReplicaCommand]) -> None:
        """Slots came free: as many gateways as there are, in turn, of those that were last told of none. They may have
        requests parked, and would hear of it only with their next frames."""
        free_slots = self._planner.slots_nobody_waits_for(self._slots - self._active)
        if free_slots > 0 and self._serving and not self._draining and self._share > 0:
            for ingress in list(self._told_full)[:free_slots]:
                self._send(now_s, ingress, [], out)

    def _room(self, link: _Link) -> m.Room | None:
        """What one gateway may hand over: an even share of what is free, as far as nobody waits in the queue for it."""
        if not self._serving or self._draining or self._share <= 0:
            return None
        sharing = len(self._links)
        free_slots = self._planner.slots_nobody_waits_for(self._slots - self._active)
        return m.Room(
            hands=link.hands,
            slots=-(-free_slots // sharing) if free_slots > 0 else 0,
            pages=max(0, self._kv_pages - self._pages_held) // sharing,
            tokens=max(0, BACKLOG_TOKENS_MAX - self._backlog_tokens),
        )

    def _begin_claim(self, ticket: m.Ticket, out: list[ev.ReplicaCommand]) -> HeldRequest:
        held = HeldRequest(
            request=ticket.request,
            attempt=ticket.attempt,
            ingress=ticket.ingress,
            profile=ticket.profile,
            pages=self._pages(ticket.profile),
        )
        self._requests[held.key] = held
        self._count(held)
        self._claim(held, out)
        return held

    def _pages(self, profile: m.RequestProfile) -> int:
        return min(max(1, profile.kv_pages_needed), self._kv_pages)

    def _claim(self, held: HeldRequest, out: list[ev.ReplicaCommand]) -> None:
        part = len(held.parts)
        claim = m.Claim(request=held.request, attempt=held.attempt, replica=self._replica, part=part, adapters=True)
        out.append(ev.SendClaim(held.ingress, claim))

    def _claim_answered(self, now_s: float, event: ev.ClaimAnswered, out: list[ev.ReplicaCommand]) -> None:
        held = self._requests.get((event.request, event.attempt))
        if held is None or held.phase is not Phase.CLAIMING:
            return  # A second grant of the same attempt is ignored.
        match event.reply:
            case m.Refusal(reason=m.RefusalReason.DEAD):
                self._serving = False
                out.append(ev.ExitReplica())
            case m.Refusal():
                self._drop(held)
                self._ack(held, out)
            case m.Grant() as grant if grant.part != len(held.parts):
                pass  # An answer to a claim of a part that we have: its own repeat is under way.
            case m.Grant() as grant:
                held.parts.append(grant)
                held.tries = 1
                if len(held.parts) < grant.parts:
                    self._claim(held, out)
                else:
                    self._granted(now_s, held, out)
            case _:
                assert_never(event.reply)

    def _granted(self, now_s: float, held: HeldRequest, out: list[ev.ReplicaCommand]) -> None:
        self._ack(held, out)
        if held.cancelled:
            self._drop(held)
            self._remember(now_s, held.key)
            return
        for attempt in range(1, held.attempt):
            older = self._requests.get((held.request, attempt))
            if older is not None and older.phase is not Phase.CLAIMING:
                self._end(now_s, older, out)
        self._begin(now_s, held, held.whole_grant(), out)

    def _begin(self, now_s: float, held: HeldRequest, grant: m.Grant, out: list[ev.ReplicaCommand]) -> None:
        link = self._link(now_s, held.ingress)
        if not link.granted:
            link.heard_s = now_s  # It had no reason to send us ``Held`` before.
        link.granted += 1
        held.phase = Phase.RUNNING
        held.start_index = held.generated = len(grant.sent_token_ids)
        held.parts = []
        held.waits = grant
        self._waiting[held.key] = held
        self._count(held)
        self._start_what_fits(out)

    def _start_what_fits(self, out: list[ev.ReplicaCommand]) -> None:
        """Gives the engine what was granted, in its order, as far as all that each may need is free: more than one pull may
        bring a ticket for the same pages, and an engine that has begun too much preempts what already runs (KVC-6).

        Nothing overtakes the first that waits, so that small ones cannot starve a long context; what does not fit beside
        anything runs alone.
        """
        for held in list(self._waiting.values()):
            if self._pages_started and self._pages_started + held.pages > self._kv_pages:
                return
            assert held.waits is not None
            out.append(ev.StartRequest(held.waits, held.profile))
            self._no_longer_waits(held)
            self._count(held)

    def _no_longer_waits(self, held: HeldRequest) -> None:
        self._waiting.pop(held.key, None)
        held.waits = None

    def _claim_unanswered(self, event: ev.ClaimUnanswered, out: list[ev.ReplicaCommand]) -> None:
        held = self._requests.get((event.request, event.attempt))
        if held is None or held.phase is not Phase.CLAIMING:
            return
        if event.kind is ev.Unanswered.TIMEOUT and held.tries < ev.CLAIM_TRIES_MAX:
            held.tries += 1
            self._claim(held, out)
            return
        # If the gateway did grant it, its next ``Held`` names it and hears ``Gone``; else the ticket comes again.
        self._drop(held)
        if held.deliveries >= ev.DELIVERIES_MAX:
            self._ack(held, out)

    @staticmethod
    def _ack(held: HeldRequest, out: list[ev.ReplicaCommand]) -> None:
        out.extend(ev.AckTicket(token) for token in held.tokens)
        held.tokens = []

    # --------------------------------------------------------------------------------------------------------- tokens

    def _engine_stepped(self, now_s: float, deltas: tuple[m.Delta, ...], out: list[ev.ReplicaCommand]) -> None:
        by_ingress: dict[IngressId, list[m.Delta]] = {}
        for delta in deltas:
            held = self._requests.get((delta.request, delta.attempt))
            if held is None or held.phase is not Phase.RUNNING:
                continue  # Aborted while this step ran.
            fault = held.fault_of(delta)
            if fault:
                out.append(ev.AbortRequest(held.request, held.attempt))
                delta = held.failure(m.FailureKind.SICK, fault, code="engine_fault")
            first = not held.next_indexes
            held.note(delta)
            if held.grow(self._block_size, self._kv_pages) or first or delta.end:
                self._count(held)
            if held.gathers(delta):
                self._gather(now_s, held, delta, by_ingress)
            else:
                self._let_out(now_s, held, by_ingress).append(delta)
                held.keep(now_s, delta)
        for ingress, fresh in by_ingress.items():
            self._send(now_s, ingress, fresh, out)

    def _gather(self, now_s: float, held: HeldRequest, delta: m.Delta, by_ingress: dict[IngressId, list[m.Delta]]) -> None:
        held.gathered.append(delta)
        if delta.end:
            self._let_out(now_s, held, by_ingress)
        elif held.key not in self._gathering:
            self._gathering[held.key] = held
            self._gather_due_s = min(self._gather_due_s, now_s + (ev.GATHER_S if held.begun else ev.GATHER_FIRST_S))

    def _let_out(self, now_s: float, held: HeldRequest, by_ingress: dict[IngressId, list[m.Delta]]) -> list[m.Delta]:
        """Puts what was gathered of a request before what follows; returns where that goes."""
        out = by_ingress.setdefault(held.ingress, [])
        if held.gathered:
            self._gathering.pop(held.key, None)
            delta = held.take_gathered()
            assert delta is not None
            held.keep(now_s, delta)
            out.append(delta)
        return out

    def _send_gathered(self, now_s: float, out: list[ev.ReplicaCommand]) -> None:
        by_ingress: dict[IngressId, list[m.Delta]] = {}
        for held in list(self._gathering.values()):
            self._let_out(now_s, held, by_ingress)
        self._gather_due_s = inf
        for ingress, fresh in by_ingress.items():
            self._send(now_s, ingress, fresh, out)

    def _engine_failed(self, now_s: float, message: str, out: list[ev.ReplicaCommand]) -> None:
        """What runs ends as sick; what is being claimed is left to be redelivered, or is ``Gone``."""
        self._serving = False
        by_ingress: dict[IngressId, list[m.Delta]] = {}
        for held in list(self._requests.values()):
            if held.phase is Phase.CLAIMING:
                self._drop(held)
            elif held.phase is Phase.RUNNING:
                delta = held.failure(m.FailureKind.SICK, message, code="engine_failed")
                self._no_longer_waits(held)
                held.note(delta)
                self._count(held)
                self._let_out(now_s, held, by_ingress).append(delta)
                held.keep(now_s, delta)
        for ingress, fresh in by_ingress.items():
            self._send(now_s, ingress, fresh, out)

    def _send(
        self,
        now_s: float,
        ingress: IngressId,
        deltas: list[m.Delta],
        out: list[ev.ReplicaCommand],
        *,
        gone: tuple[m.Gone, ...] = (),
    ) -> None:
        """One message of frames, or as many as its bounds ask for; one even if it says nothing."""
        link = self._link(now_s, ingress)
        link.sent_s = now_s
        first = 0
        size = 0
        for end in range(len(deltas) + 1):
            last = end == len(deltas)
            if last or end - first >= ev.FRAME_DELTAS_MAX or size >= ev.FRAME_BYTES_MAX:
                link.frames_sent += 1
                frames = m.Frames(
                    replica=self._replica,
                    sequence=link.frames_sent,
                    deltas=tuple(deltas[first:end]),
                    gone=gone if last else (),
                    room=self._word_of_room(ingress, link) if last else None,
                )
                out.append(ev.SendFrames(ingress, frames))
                first, size = end, 0
            if not last:
                size += len(deltas[end].text) + len(deltas[end].detail)

    # ------------------------------------------------------------------------------------------- what gateways tell us

    def _take_back(self, now_s: float, back: m.Back, out: list[ev.ReplicaCommand]) -> None:
        match back:
            case m.Held():
                self._take_held(now_s, back, out)
            case m.Cancel():
                held = self._requests.get((back.request, back.attempt))
                if held is None:
                    return
                if held.phase is Phase.CLAIMING:
                    held.cancelled = True  # Its grant may be on its way.
                else:
                    self._end(now_s, held, out)
            case m.Resend():
                held = self._requests.get((back.request, back.attempt))
                if held is None:
                    gone = m.Gone(request=back.request, attempt=back.attempt)
                    self._remember(now_s, (back.request, back.attempt))
                    self._send(now_s, back.ingress, [], out, gone=(gone,))
                    return
                wanted = [
                    kept
                    for kept in held.outbox
                    if kept.delta.choice == back.choice and kept.delta.first_token_index >= back.from_index
                ]
                for kept in wanted:
                    kept.sent_s = now_s
                if wanted:
                    self._send(now_s, held.ingress, [kept.delta for kept in wanted], out)
            case _:
                assert_never(back)

    def _take_held(self, now_s: float, back: m.Held, out: list[ev.ReplicaCommand]) -> None:
        link = self._link(now_s, back.ingress)
        if back.sequence <= link.held_sequence:
            return  # Late or doubled: what it names may be over.
        link.held_sequence = back.sequence
        link.heard_s = now_s
        link.hands = max(link.hands, back.hands)
        named: set[Key] = set()
        gone: list[m.Gone] = []
        for entry in back.entries:
            key = (entry.request, entry.attempt)
            named.add(key)
            held = self._requests.get(key)
            if held is None:
                # Never claimed again from here on: the gateway moves to the next attempt when it hears this.
                self._remember(now_s, key)
                gone.append(m.Gone(request=entry.request, attempt=entry.attempt))
            else:
                held.unnamed = 0
                held.outbox = [kept for kept in held.outbox if not kept.confirmed_by(entry.next_indexes)]
        for held in list(self._requests.values()):
            if held.ingress == back.ingress and held.phase is not Phase.CLAIMING and held.key not in named:
                held.unnamed += 1
                if held.unnamed >= ev.UNNAMED_HELD_MAX:
                    self._end(now_s, held, out)
        self._send(now_s, back.ingress, [], out, gone=tuple(gone))

    def _beat(self, now_s: float, out: list[ev.ReplicaCommand]) -> None:
        """Sends again what stays unconfirmed; ends what belongs to a gateway that fell silent."""
        self._beat_due_s = now_s + BEAT_S
        bus_works = now_s - self._round_trip_s <= ev.ROUND_TRIP_FRESH_S
        for ingress, link in list(self._links.items()):
            silent_s = now_s - max(link.heard_s, self._silence_counts_from_s)
            theirs = self._granted_by(ingress) if link.granted else []
            if theirs and bus_works and silent_s > ev.HELD_SILENCE_S:
                for held in theirs:
                    self._end(now_s, held, out)
            elif not theirs and now_s - link.heard_s > LINK_IDLE_S:
                del self._links[ingress]
                self._told_full.pop(ingress, None)
            else:
                self._send_again(now_s, ingress, theirs, out)

    def _granted_by(self, ingress: IngressId) -> list[HeldRequest]:
        return [h for h in self._requests.values() if h.ingress == ingress and h.phase is not Phase.CLAIMING]

    def _send_again(self, now_s: float, ingress: IngressId, theirs: list[HeldRequest], out: list[ev.ReplicaCommand]) -> None:
        late = [kept for held in theirs for kept in held.outbox if now_s - kept.sent_s >= ev.CONFIRM_S]
        late = late[: ev.FRAME_DELTAS_MAX]  # One message per beat: a gateway that was away is not buried.
        for kept in late:
            kept.sent_s = now_s
        link = self._links[ingress]
        if late or (theirs and now_s - max(link.heard_s, link.sent_s) >= ev.ASK_S):
            self._send(now_s, ingress, [kept.delta for kept in late], out)

    # ------------------------------------------------------------------------------------------------------- the end

    def _give_back(self, now_s: float, out: list[ev.ReplicaCommand]) -> None:
        """The bound of a drain: what is left goes on elsewhere, or ends, as its gateway decides."""
        self._drained = True
        by_ingress: dict[IngressId, list[m.Gone]] = {}
        for held in list(self._requests.values()):
            by_ingress.setdefault(held.ingress, []).append(m.Gone(request=held.request, attempt=held.attempt))
            if held.phase is Phase.CLAIMING:
                self._drop(held)
                self._remember(now_s, held.key)
            else:
                self._end(now_s, held, out)
        for ingress, gone in by_ingress.items():
            self._send(now_s, ingress, [], out, gone=tuple(gone))
        out.append(ev.ReportDrained(sum(len(gone) for gone in by_ingress.values())))

    def _end(self, now_s: float, held: HeldRequest, out: list[ev.ReplicaCommand]) -> None:
        if held.phase is Phase.RUNNING and held.waits is None:
            out.append(ev.AbortRequest(held.request, held.attempt))
        self._drop(held)
        self._remember(now_s, held.key)

    def _drop(self, held: HeldRequest) -> None:
        del self._requests[held.key]
        self._no_longer_waits(held)
        self._gathering.pop(held.key, None)
        self._count(held, dropped=True)
        if held.phase is not Phase.CLAIMING:
            self._links[held.ingress].granted -= 1

    def _remember(self, now_s: float, key: Key) -> None:
        self._ended.pop(key, None)
        self._ended[key] = now_s + ev.ENDED_S
        while len(self._ended) > ev.ENDED_MAX:
            self._ended.popitem(last=False)

    def _link(self, now_s: float, ingress: IngressId) -> _Link:
        link = self._links.get(ingress)
        if link is None:
            link = self._links[ingress] = _Link(heard_s=now_s)
        return link
