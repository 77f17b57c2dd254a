"""The simulated pool: a heap of events, a virtual clock, requests, queues, replicas and devices.

Who decides is not here: :mod:`ops.simulator.control` runs the scheduler's and the agents' own cores on this world. Requests
go in *flow*: per model one queue, from which a ready replica takes while it has room by the replicas' own rule
(``workers.core.pulling.room_for``). Counting, expected lengths, yielding and classes are the gateway's own code.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from heapq import heappop, heappush
from math import inf

import numpy as np

from broker.core.requests.admission import yields_at_s
from broker.core.requests.demand import DemandLedger, within_slo
from ops.simulator.device import PACE_SHARE, SimDevice, began, ended, error_factors, wants
from ops.simulator.engine import Engine
from ops.simulator.options import RunOptions
from ops.simulator.queueing import BATCH, CLASSES, Live, ModelQueue
from ops.simulator.replicas import SimReplica, least_loaded
from ops.simulator.types import BLOCK_TOKENS, DEVICE_TYPE, Trace, Workload
from profiles.capacity import lane_of, pages_for
from profiles.features import OutputLengths
from subjects.ids import DeploymentKey, ReplicaId, RequestId, Tenant
from subjects.messages import Endpoint, ModelRecord, RequestKind, RequestProfile
from workers.core.pulling import room_for

TENANT = Tenant("simulated")
PAUSE_S = 10.0
"""An answer that was interrupted and is ahead of its time per token by more than this goes on behind the others."""
LOOKED_AT_MAX = 32
"""Replicas of a model among which a request that arrives chooses."""
LOOK_PAST_MAX = 32
"""Requests too large for a replica's whole KV that it looks past for one that fits."""


class World:
    """Advances by :meth:`run`. What happened to requests lies in columns, one row per request of the trace."""

    def __init__(self, workload: Workload, trace: Trace, seed: int, start_s: float, options: RunOptions) -> None:
        self.workload = workload
        self.options = options
        self.now_s = start_s
        self.models = workload.models
        pool = workload.pool
        self.devices = [SimDevice(number, pool.shared_efficiency) for number in range(pool.devices)]
        for device in self.devices:
            device.busy_since_s = device.held_since_s = start_s
        self.records: list[ModelRecord] = [model.record(model.kv_bytes_alone(pool.device_bytes)) for model in self.models]
        self.deployments: list[DeploymentKey] = [record.deployment for record in self.records]
        self._classes = [CLASSES.index(record.sla_class) for record in self.records]
        self.model_of = {deployment: number for number, deployment in enumerate(self.deployments)}
        self.factors = error_factors(seed, len(self.models), pool.devices, options.error_sigma)
        # Plain arrays: nearly as fast as lists, and a day of requests stays small.
        self.arrival_s = array("d", trace.arrival_s.astype(np.float64).tobytes())
        self.model_at = array("i", trace.model.astype(np.intc).tobytes())
        self.input_at = array("i", trace.input_tokens.astype(np.intc).tobytes())
        self.output_at = array("i", trace.output_tokens.astype(np.intc).tobytes())
        self.class_at = array("B", trace.sla_class.astype(np.uint8).tobytes()) if trace.sla_class is not None else None
        count = len(trace)
        self.first_s = array("d", [-1.0]) * count
        """When the first token came; negative where none did."""
        self.end_s = array("d", [-1.0]) * count
        """When the last one did; negative for requests that did not finish."""
        self.refused = bytearray(count)
        self.ended = 0
        """Requests that finished or were refused."""
        self.interrupted = 0
        """Requests that went back to their queue with a part of their answer sent."""
        self.retries = 0
        self.preempted = 0
        """By engines that are gone."""
        self.held_devices = 0
        self.most_held = 0
        """Most devices that held something at once."""
        self.ledger = DemandLedger()
        self.lengths = OutputLengths()
        self.queues = [ModelQueue() for _ in self.models]
        self.serving: list[list[SimReplica]] = [[] for _ in self.models]
        """Ready replicas that take requests, in order of number."""
        self.running = [0] * len(self.models)
        self.replicas: dict[ReplicaId, SimReplica] = {}
        self.replica_of: dict[int, SimReplica] = {}
        """By number, which is their engine's too."""
        self.when_starved: Callable[[int], None] = lambda model: None
        """Called when a model without any ready replica starts to wait."""
        self.when_drained: Callable[[SimReplica], None] = lambda replica: None
        """Called when a draining replica holds nothing any more."""
        self._numbers = 0
        self._turn = 0
        self._heap: list[tuple[float, int, SimReplica | None, int, Callable[[], None] | None]] = []
        self._ties = 0
        self._next_arrival = 0
        self._patient: dict[int, Live] = {}

    # ------------------------------------------------------------------------------------------------------------ clock

    def at(self, at_s: float, action: Callable[[], None]) -> None:
        """Calls ``action`` at that time; equal times in order of calls."""
        self._ties += 1
        heappush(self._heap, (at_s, self._ties, None, 0, action))

    def run(self, until_s: float) -> None:
        """Lets all events up to ``until_s`` happen."""
        heap = self._heap
        arrivals = self.arrival_s
        count = len(arrivals)
        coming = self._next_arrival
        coming_s = arrivals[coming] if coming < count else inf
        while True:
            event_s = heap[0][0] if heap else inf
            if coming_s <= event_s:
                if coming_s > until_s:
                    break
                self.now_s = coming_s
                self._arrive(coming)
                coming = self._next_arrival = coming + 1
                coming_s = arrivals[coming] if coming < count else inf
                continue
            if event_s > until_s:
                break
            _, _, replica, version, action = heappop(heap)
            if replica is None:
                self.now_s = event_s
                assert action is not None
                action()
            elif replica.engine.version == version:
                self.now_s = event_s
                self._step(replica)
        self.now_s = until_s

    def _push(self, replica: SimReplica) -> None:
        engine = replica.engine
        if engine.want != replica.want and replica.working:
            replica.want = engine.want
            for other in wants(self.now_s, engine, replica.devices, self._devices_of):
                self._push(self.replica_of[other.number])
        if engine.version != replica.pushed and engine.end_s < inf:
            replica.pushed = engine.version
            self._ties += 1
            heappush(self._heap, (engine.end_s, self._ties, replica, engine.version, None))

    # --------------------------------------------------------------------------------------------------------- requests

    def _arrive(self, index: int) -> None:
        now_s = self.now_s
        model = self.model_at[index]
        record = self.records[model]
        deployment = self.deployments[model]
        inputs = self.input_at[index]
        expected = self.lengths.expected(self.records[model].model_hash, TENANT, RequestKind.INFERENCE)
        if expected is None:
            expected = record.max_output_tokens_default
        pages = pages_for(inputs + expected, BLOCK_TOKENS)
        queue_class = self._classes[model] if self.class_at is None else self.class_at[index]
        profile = RequestProfile(
            model_hash=self.records[model].model_hash,
            deployment=deployment,
            endpoint=Endpoint.CHAT,
            tenant=TENANT,
            sla_class=CLASSES[queue_class],
            lane=lane_of(pages),
            max_tokens=record.max_context_len - inputs,
            stream=True,
            input_tokens=inputs,
            expected_output_tokens=expected,
            kv_pages_needed=pages,
            deadline_unix_s=inf,
            continuable=True,
        )
        live = Live(index, model, profile, self.output_at[index], now_s, queue_class)
        if self.options.patience is not None:
            self._expect(live)
        self._come(live)

    def _come(self, live: Live) -> None:
        self.ledger.arrived(live.profile)
        queue = self.queues[live.model]
        if not queue.count:
            replica = self._with_room(live)
            if replica is not None:
                self._give(live, replica)
                return
        self._wait(live, first=False)

    def _wait(self, live: Live, *, first: bool) -> None:
        queue = self.queues[live.model]
        if not self.options.fair:
            live.queue_class = 0
        if live.first_s < 0.0 and self.options.fair:
            live.yields_s = yields_at_s(self.records[live.model], live.input_tokens, self.arrival_s[live.index])
        (queue.put_back if first else queue.put)(live)
        self.ledger.waits(live.profile, RequestId(str(live.index)), live.since_s)
        if queue.count == 1 and not self.serving[live.model]:
            self.when_starved(live.model)

    def _with_room(self, live: Live) -> SimReplica | None:
        """Who takes it, if anybody has room. Of very many replicas only some are looked at first, each time others: whoever
        pulls does not know the load of all others either."""
        serving = self.serving[live.model]
        count = len(serving)
        if count > LOOKED_AT_MAX:
            place = self._turn = (self._turn + LOOKED_AT_MAX) % count
            some = serving[place : place + LOOKED_AT_MAX] + serving[: max(0, place + LOOKED_AT_MAX - count)]
            best = least_loaded(some, live)
            if best is not None:
                return best
        return least_loaded(serving, live)

    def _give(self, live: Live, replica: SimReplica) -> None:
        needed = live.pages_needed = min(live.pages_needed, replica.kv_pages)
        replica.pages_taken += needed
        replica.held += 1
        self.running[live.model] += 1
        self.ledger.runs(live.profile, 1)
        replica.engine.add(self.now_s, live)
        if not replica.working:
            self._began(replica)
        self._push(replica)

    def pull(self, replica: SimReplica) -> None:
        """Takes from its model's queue what it has room for."""
        queue = self.queues[replica.model]
        now_s = self.now_s
        while queue.count and replica.weight > 0.0:
            live = queue.next(now_s)
            if live is None:
                return
            if live.input_tokens + live.output_tokens > replica.kv_pages * BLOCK_TOKENS:
                fitting = [
                    other
                    for other in queue.others(live, LOOK_PAST_MAX)
                    if other.input_tokens + other.output_tokens <= replica.kv_pages * BLOCK_TOKENS
                ]
                if not fitting:
                    return
                live = fitting[0]
            needed = min(live.pages_needed, replica.kv_pages)
            if not room_for(replica.slots - replica.held, replica.pages_free, needed, replica.engine.backlog_tokens):
                return
            queue.take(live)
            self.ledger.stopped_waiting(live.profile, RequestId(str(live.index)))
            self._give(live, replica)

    def _step(self, replica: SimReplica) -> None:
        engine = replica.engine
        now_s = self.now_s
        engine.step(now_s)
        finished = engine.finished
        if finished:
            for sequence in finished:
                self._finish(replica, sequence)  # type: ignore[arg-type]  # this world gives engines nothing else
            finished.clear()
        if replica.ready and self.queues[replica.model].count:
            self.pull(replica)
        if not engine.active and replica.working:
            self._ended(replica)
        self._push(replica)
        if replica.draining and not replica.held:
            self.when_drained(replica)

    def _finish(self, replica: SimReplica, live: Live) -> None:
        now_s = self.now_s
        index = live.index
        self._release(replica, live)
        self.first_s[index] = live.first_s
        self.end_s[index] = now_s
        self.ended += 1
        if self._patient:
            self._patient.pop(index, None)
        ttft_s = live.first_s - self.arrival_s[index]
        latency_s = now_s - self.arrival_s[index]
        tokens = live.output_tokens
        self.ledger.finished(
            live.profile,
            output_tokens=tokens,
            ttft_s=ttft_s,
            latency_s=latency_s,
            within_slo=within_slo(self.records[live.model].sla, ttft_s, latency_s, tokens),
        )
        self.lengths.observe(live.profile.model_hash, TENANT, RequestKind.INFERENCE, tokens)

    def _release(self, replica: SimReplica, live: Live) -> None:
        replica.held -= 1
        replica.pages_taken -= live.pages_needed
        live.pages_needed = live.profile.kv_pages_needed
        self.running[live.model] -= 1
        self.ledger.runs(live.profile, -1)

    def _refuse(self, live: Live) -> None:
        self.refused[live.index] = 1
        self.ended += 1
        self._patient.pop(live.index, None)
        self.ledger.failed(live.profile)

    def look_after_queues(self) -> None:
        """Ends the wait of those that waited for ``max_wait_s``, and lets replicas look once more: behind a request that
        none of them can hold others may wait that they can."""
        bound_s = self.now_s - self.options.max_wait_s
        for model, queue in enumerate(self.queues):
            if not queue.count:
                continue
            for live in queue.late(bound_s):
                queue.remove(live)
                self.ledger.stopped_waiting(live.profile, RequestId(str(live.index)))
                self._refuse(live)
            for replica in self.serving[model]:
                if not queue.count:
                    break
                self.pull(replica)

    # -------------------------------------------------------------------------------------------------- impatient clients

    def _expect(self, live: Live) -> None:
        assert self.options.patience is not None
        self._patient[live.index] = live
        tries = live.tries
        self.at(self.now_s + self.options.patience.wait_s, lambda: self._give_up(live, tries))

    def _give_up(self, live: Live, tries: int) -> None:
        """Still no first token: its client hangs up, and comes again at once while it has tries left."""
        patience = self.options.patience
        assert patience is not None
        if self._patient.get(live.index) is not live or live.tries != tries or live.first_s >= 0.0:
            return
        if live.waiting:
            self.queues[live.model].remove(live)
            self.ledger.stopped_waiting(live.profile, RequestId(str(live.index)))
        else:
            engine = live.engine
            assert engine is not None
            replica = self.replica_of[engine.number]
            engine.abort(self.now_s, live)
            self._release(replica, live)
            self._push(replica)
        self.ledger.failed(live.profile)
        if live.tries >= patience.tries_max:
            self._patient.pop(live.index)
            self.refused[live.index] = 1
            self.ended += 1
            return
        self.retries += 1
        again = Live(live.index, live.model, live.profile, live.output_tokens, self.now_s)
        again.tries = live.tries + 1
        self._expect(again)
        self._come(again)

    # ---------------------------------------------------------------------------------------------------------- replicas

    def spawn(self, replica_id: ReplicaId, model: int, devices: list[int], kv_bytes: int) -> SimReplica:
        """A replica comes to be, not ready yet: from now on its devices hold it."""
        self._numbers += 1
        places = tuple(self.devices[number] for number in devices)
        spec = self.models[model]
        engine = Engine(
            spec.costs,
            kv_pages=kv_bytes // (spec.kv_bytes_per_token * BLOCK_TOKENS),
            slots=spec.slots,
            chunk_tokens=spec.chunk_tokens,
            factor=max(self.factors[model][number] for number in devices),
            number=self._numbers,
            pace_s=spec.tpot_s * PACE_SHARE if self.workload.pool.takes_turns else 0.0,
            tpot_s=spec.tpot_s if self.workload.pool.takes_turns else 0.0,
            ttft_s=spec.ttft_s,
        )
        replica = SimReplica(self._numbers, replica_id, model, places, engine, kv_bytes)
        replica.last_used_s = self.now_s
        self._hold(places, +1)
        self.replicas[replica_id] = replica
        self.replica_of[replica.number] = replica
        return replica

    def make_ready(self, replica: SimReplica) -> None:
        """It serves from now on."""
        replica.ready = True
        replica.last_used_s = self.now_s
        self.serving[replica.model].append(replica)
        self.pull(replica)

    def drain(self, replica: SimReplica, bound_s: float) -> None:
        """Takes nothing more; what it has not finished after ``bound_s`` goes back to the queue."""
        self._stop_serving(replica)
        replica.draining = True
        if not replica.held:
            self.when_drained(replica)
        elif bound_s <= 0.0:
            self.interrupt(replica)
        else:
            self.at(self.now_s + bound_s, lambda: self.interrupt(replica) if replica.draining else None)

    def interrupt(self, replica: SimReplica) -> None:
        """What it holds goes back to its queue, in order, and continues elsewhere from the tokens already sent."""
        held = replica.held
        for sequence in reversed(replica.engine.take_all(self.now_s)):
            assert isinstance(sequence, Live)
            self._release(replica, sequence)
            self.interrupted += 1
            if sequence.made:
                sequence.since_s = self.now_s
                if self._can_pause(sequence):
                    # Its prompt and all of its answer are computed again: nobody's first token waits for that.
                    sequence.queue_class = BATCH
            self._wait(sequence, first=True)
        if replica.working:
            self._ended(replica)
        if held and replica.draining:
            self.when_drained(replica)
        model = replica.model
        for other in self.serving[model]:
            if self.queues[model].count:
                self.pull(other)

    def _can_pause(self, live: Live) -> bool:
        """Whether an answer that was interrupted keeps its mean time per token even if it goes on only after a while."""
        due_s = live.first_s + live.made * self.models[live.model].tpot_s
        return due_s - self.now_s > PAUSE_S

    def end(self, replica: SimReplica) -> None:
        """Its process is gone."""
        self._stop_serving(replica)
        replica.draining = False
        if replica.held:
            self.interrupt(replica)
        self._hold(replica.devices, -1)
        self.preempted += replica.engine.preempted
        del self.replicas[replica.replica]
        del self.replica_of[replica.number]

    def _hold(self, devices: tuple[SimDevice, ...], change: int) -> None:
        for device in devices:
            before = device.holds > 0
            device.hold(self.now_s, change)
            self.held_devices += (device.holds > 0) - before
        self.most_held = max(self.most_held, self.held_devices)

    def _stop_serving(self, replica: SimReplica) -> None:
        if replica.ready:
            replica.ready = False
            self.serving[replica.model].remove(replica)

    def pages_of(self, replica: SimReplica, kv_bytes: int) -> int:
        """How many pages such a KV budget is."""
        return kv_bytes // (self.models[replica.model].kv_bytes_per_token * BLOCK_TOKENS)

    def resize(self, replica: SimReplica, kv_bytes: int) -> None:
        """Another KV budget."""
        replica.kv_bytes = kv_bytes
        replica.kv_pages = self.pages_of(replica, kv_bytes)
        most = max((s.input_tokens + s.output_tokens for s in replica.engine.sequences()), default=0)
        if most > replica.kv_pages * BLOCK_TOKENS:
            self.interrupt(replica)  # One of them could never finish here.
        replica.engine.resize(self.now_s, replica.kv_pages)
        self._push(replica)
        if replica.ready:
            self.pull(replica)

    def set_slots(self, replica: SimReplica, slots: int) -> None:
        """Another bound on what runs at once."""
        replica.slots = slots
        replica.engine.set_slots(self.now_s, slots)
        self._push(replica)
        if replica.ready:
            self.pull(replica)

    def set_weight(self, replica: SimReplica, weight: float) -> None:
        """Another routing weight."""
        grew = weight > replica.weight
        replica.weight = weight
        if grew and replica.ready:
            self.pull(replica)

    # ------------------------------------------------------------------------------------------------------ shared devices

    def _began(self, replica: SimReplica) -> None:
        replica.working = True
        for other in began(self.now_s, replica.engine, replica.devices, self._devices_of):
            self._push(self.replica_of[other.number])

    def _ended(self, replica: SimReplica) -> None:
        replica.working = False
        replica.last_used_s = self.now_s
        for other in ended(self.now_s, replica.engine, replica.devices, self._devices_of):
            self._push(self.replica_of[other.number])

    def _devices_of(self, engine: Engine) -> tuple[SimDevice, ...]:
        return self.replica_of[engine.number].devices

    def device_type(self) -> str:
        """Of all its devices."""
        return self.workload.pool.device_type or DEVICE_TYPE
