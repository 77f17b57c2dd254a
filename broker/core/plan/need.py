"""What each model needs now: capacity and KV, from what arrives, waits and runs (SCH-3).

Capacity is counted in the work of ``capacity``: prompts with the room that ``headroom`` has learned, decoding by Little's
law from arrivals and from what runs, and what waits on top of both.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from broker.core.plan import tunables as t
from broker.core.plan.headroom import Headroom
from broker.core.plan.policy import ModelView
from profiles.costs import context_mean_tokens, prefill_s, standing_share
from subjects.ids import DeploymentKey
from subjects.messages import ReplicaState, StepCosts


class Largest:
    """The largest value of a sliding window."""

    def __init__(self, span_s: float) -> None:
        self.span_s = span_s
        self._entries: deque[tuple[float, float]] = deque()

    def add(self, now_s: float, value: float) -> float:
        """Counts a value and returns the largest."""
        entries = self._entries
        while entries and entries[-1][1] <= value:
            entries.pop()
        entries.append((now_s, value))
        while entries[0][0] < now_s - self.span_s:
            entries.popleft()
        return entries[0][1]


BINS, BIN_FIRST_S, BIN_RATIO = t.LENGTH_BINS


class Lengths:
    """How long prompts take alone: a histogram over logarithmic bins that fades."""

    def __init__(self) -> None:
        self._bins = [0.0] * int(BINS)
        self._total = 0.0

    def add(self, prefill_s: float, requests: int) -> None:
        """So many requests of about this length."""
        place = 0 if prefill_s <= BIN_FIRST_S else math.ceil(math.log(prefill_s / BIN_FIRST_S) / math.log(BIN_RATIO) - 0.5)
        self._bins[min(max(place, 0), int(BINS) - 1)] += requests
        self._total += requests
        if self._total > 4000.0:
            self._bins = [count / 2 for count in self._bins]
            self._total /= 2

    def above(self, share: float) -> float:
        """The prefill time that only this share of requests exceeds."""
        left = self._total * share
        for place in range(int(BINS) - 1, -1, -1):
            left -= self._bins[place]
            if left < 0:
                return BIN_FIRST_S * BIN_RATIO**place
        return 0.0


@dataclass(slots=True)
class ModelNeed:
    """The answer for one model at one moment."""

    load: float = 0.0
    load_keep: float = 0.0
    """The most of it lately: so much must be left before anything is given up."""
    prefill: float = 0.0
    """Speed of prefill that bursts ask for."""
    burst_share: float = 1.0
    """Of a replica's time, what prompts get while they queue."""
    mean: float = 0.0
    """Prefill that arrives, with a little room; just now; and usually while it comes."""
    fast: float = 0.0
    level: float = 0.0
    decode: float = 0.0
    queue: float = 0.0
    waiting_s: float = 0.0
    """Prefill of what waits."""
    share: float = 0.0
    """Of its devices' time, what a replica has on average."""
    share_min: float = 0.0
    share_floor: float = 0.0
    """Of its devices' time: what its replicas turned out to need."""
    kv_tokens: float = 0.0
    seats: float = 0.0
    """Requests that should be able to run at once."""
    activity: float = 0.0
    running: float = 0.0
    input_tokens: float = 1024.0
    output_tokens: float = 256.0
    """Means of those that arrived lately."""
    token_s: float = 0.0
    """What one more request adds to a decode step."""
    request_s: float = 0.0
    """Work of a mean request."""
    life_s: float = 2.0
    """How long a request runs, about."""
    last_seen_s: float = -math.inf
    """When it last had any demand."""
    rps: float = 0.0

    @property
    def text(self) -> str:
        """One line with the numbers."""
        return (
            f"needs {self.load:.2f} (prompts {self.mean:.2f}, in bursts {self.prefill:.2f}, answers {self.decode:.2f}, "
            f"queue {self.queue:.2f}) for {self.rps:.2f}/s"
        )


@dataclass(slots=True)
class Correction:
    """What turns out to be too little for a model: more is asked for where requests wait or go on missing targets (decisions
    0023, 0025).

    Two things can be wrong with what was reckoned. There may be more work than it says: then more *load* is asked for. Or
    what is there carries the load, but answers too slowly beside its neighbours: then more *of its devices' time* is asked
    for, which helps models whose load is small and whose prompts are long.
    """

    load: float = 0.0
    """By how much more load is asked for than is reckoned, as a share of it."""
    share: float = 0.0
    """Of its devices' time: what each of its replicas should have."""
    _memory_s: float = t.LOAD_MEMORY_S
    _raised_s: float = math.inf
    """When ``load`` last grew; never so far: infinite."""
    _begun_s: float = math.inf
    _finished: float = 0.0
    _missed: float = 0.0
    _lasting_finished: float = 0.0
    _lasting_missed: float = 0.0

    def look(self, now_s: float, gone_s: float, finished: int, missed: int, waits: float, *, cold: bool = False) -> None:
        """What happened in the last ``gone_s`` seconds: requests that ended, how many of them missed their targets, and
        for how much of the time to the first token (1: all of it) the first in the queue has waited. ``cold``: no replica
        is ready."""
        self._begun_s = now_s if cold else min(self._begun_s, now_s)
        lasting = self._lasting(now_s, gone_s, finished, missed)
        share = self.share * math.exp(-gone_s / t.SHARE_MEMORY_S) + lasting * gone_s / t.SHARE_RISE_S
        self.share = min(t.SHARE_MIN_MOST, share)
        fade = math.exp(-gone_s / t.MISSED_MEMORY_S)
        self._finished = self._finished * fade + finished
        self._missed = self._missed * fade + missed
        excess = self._missed / (self._finished + t.MISSED_PRIOR) - t.MISSED_FREE
        more = t.LOAD_MISSED * min(max(excess, 0.0), 0.1) + (t.LOAD_WAITING if waits > t.WAIT_SHARE else 0.0)
        self.load *= math.exp(-gone_s / self._memory_s)
        if more > 0:
            if now_s - self._raised_s > t.MISSED_MEMORY_S:
                self._memory_s = min(2.0 * self._memory_s, t.LOAD_MEMORY_S_MAX)
            self._raised_s = now_s
            most = t.LOAD_MAX + t.LOAD_LASTING * lasting
            self.load = max(self.load, min(self.load + more * gone_s, most))
        else:
            self._memory_s += (t.LOAD_MEMORY_S - self._memory_s) * gone_s / t.RELAPSE_MEMORY_S

    def _lasting(self, now_s: float, gone_s: float, finished: int, missed: int) -> float:
        """How much misses last, from 0 to 1."""
        if now_s - self._begun_s < t.LASTING_AFTER_S:
            return 0.0
        fade = math.exp(-gone_s / t.LASTING_S)
        self._lasting_finished = self._lasting_finished * fade + finished
        self._lasting_missed = self._lasting_missed * fade + missed
        share = self._lasting_missed / (self._lasting_finished + t.LASTING_PRIOR)
        return min(max(share / t.LASTING_MISSED - 1.0, 0.0), 1.0)


@dataclass(slots=True)
class _Tracker:
    row: int
    need: ModelNeed = field(default_factory=ModelNeed)
    busy: bool = False
    resident: bool = False
    correction: Correction = field(default_factory=Correction)
    followed_s: float = -math.inf
    lengths: Lengths = field(default_factory=Lengths)
    decode: float = 0.0
    load_most: Largest = field(default_factory=lambda: Largest(t.NEED_KEEP_S))
    share_most: Largest = field(default_factory=lambda: Largest(t.SHARE_KEEP_S))
    seats_most: Largest = field(default_factory=lambda: Largest(t.KV_KEEP_S))
    kv_most: Largest = field(default_factory=lambda: Largest(t.KV_KEEP_S))
    requests: float = 0.0
    tokens_in: float = 0.0
    finished: float = 0.0
    tokens_out: float = 0.0
    expected: float = 0.0


class Needs:
    """Follows all models."""

    def __init__(self, keep_s: float, keep_lives: float, *, learns: bool) -> None:
        self.headroom = Headroom(learns=learns)
        self._keep_s, self._keep_lives = keep_s, keep_lives
        self._trackers: dict[DeploymentKey, _Tracker] = {}
        self._free_rows: list[int] = []
        self._base = np.zeros(0)
        self._wait_s = np.ones(0)

    def look(
        self,
        now_s: float,
        models: list[tuple[ModelView, StepCosts]],
        spare: Mapping[DeploymentKey, float],
        shares: Mapping[DeploymentKey, float],
    ) -> list[ModelNeed]:
        """Takes what happened since the last look; ``models`` come with their costs, corrected by what was seen. ``spare``
        is the share of devices that each could borrow from its neighbours at once, ``shares`` what its replicas have of
        their devices' time on average. The answers are in their order."""
        trackers = self._known(models)
        if len(self._base) != self.headroom.rows:
            self._base, self._wait_s = (np.resize(known, self.headroom.rows) for known in (self._base, self._wait_s))
        means = self.headroom.means()
        for (model, costs), tracker in zip(models, trackers, strict=True):
            need, row = tracker.need, tracker.row
            busy = bool(model.running or model.waiting or any(model.arrivals.requests))
            gone_s = now_s - tracker.followed_s
            if not busy and not tracker.busy and gone_s < t.LOOK_S:
                continue
            tracker.busy = busy
            need.share = shares.get(model.record.deployment, 0.0)
            tracker.followed_s = now_s
            self._follow(now_s, min(max(1e-3, gone_s), 5.0), model, costs, tracker)
            need.mean = means[row]
            # While prompts queue each step takes a chunk of them, and decodes once beside it.
            chunk_s = costs.prefill_token_s * t.CHUNK_TOKENS
            batch = need.running / max(1, len(model.replicas))
            need.burst_share = chunk_s / (chunk_s + costs.step_const_s + batch * need.token_s)
            # Prompts go first, but answers cannot wait for ever: the less so the shorter they are.
            patience = need.life_s / (need.life_s + t.PATIENCE_S)
            average = need.burst_share * (need.mean + need.decode + standing(model, costs))
            average = need.mean + patience * max(0.0, average - need.mean)
            there = max(spare.get(model.record.deployment, 0.0), t.SHARE_LEAST)
            self._base[row] = max(average, need.burst_share * there)
            self._wait_s[row] = max(0.2, 0.9 * model.record.sla.ttft_p95_ms / 1000 - tracker.lengths.above(0.1))
            need.level = self.headroom.level(row)
        wanted = self.headroom.look(now_s, self._base, self._wait_s).tolist()
        fast = self.headroom.fasts()
        for (model, costs), tracker in zip(models, trackers, strict=True):
            need, waiting = tracker.need, model.waiting
            need.prefill, need.fast = wanted[tracker.row], fast[tracker.row]
            need.waiting_s = waiting * prefill_s(costs, model.waiting_input_tokens / waiting) if waiting else 0.0
            # Of what waits, what can be answered meanwhile counts with its answers.
            answers_s = waiting * need.output_tokens * need.token_s * min(1.0, t.QUEUE_DRAIN_S / need.life_s)
            need.queue = min(t.QUEUE_REPLICAS_MAX, max(0.0, need.waiting_s + answers_s - t.QUEUE_FREE_S) / t.QUEUE_DRAIN_S)
            patience = need.life_s / (need.life_s + t.PATIENCE_S)
            burst = need.prefill / need.burst_share - standing(model, costs)
            burst += (1 - patience) * max(0.0, need.prefill + need.decode - burst)
            need.load = max(burst, need.mean + need.decode) * (1.0 + tracker.correction.load) + need.queue
            need.load_keep = tracker.load_most.add(now_s, need.load)
        return [tracker.need for tracker in trackers]

    def _known(self, models: list[tuple[ModelView, StepCosts]]) -> list[_Tracker]:
        present = {model.record.deployment: model.replicas for model, _ in models}
        for deployment in [known for known in self._trackers if known not in present]:
            self._free_rows.append(self._trackers.pop(deployment).row)
            self.headroom.forget_row(self._free_rows[-1])
        trackers = []
        for deployment, replicas in present.items():
            tracker = self._trackers.get(deployment)
            if tracker is None:
                row = self._free_rows.pop() if self._free_rows else self.headroom.add_row()
                tracker = self._trackers[deployment] = _Tracker(row)
            if replicas and not tracker.resident:  # What was used before anybody looked shows in its replicas alone.
                used_s = max((r.last_used_s for r in replicas if r.state is ReplicaState.READY), default=-math.inf)
                tracker.need.last_seen_s = max(tracker.need.last_seen_s, used_s)
            tracker.resident = bool(replicas)
            trackers.append(tracker)
        return trackers

    def _follow(self, now_s: float, gone_s: float, model: ModelView, costs: StepCosts, tracker: _Tracker) -> None:
        need = tracker.need
        arrivals = model.arrivals
        requests = sum(arrivals.requests)
        if requests:
            first_s = 0.0  # Within a length class all requests count as equal.
            for count, tokens in zip(arrivals.requests, arrivals.input_tokens, strict=True):
                if count:
                    each_s = prefill_s(costs, tokens / count)
                    first_s += count * each_s
                    tracker.lengths.add(each_s, count)
            self.headroom.arrived(tracker.row, first_s, requests)
            fade = math.exp(-requests / 300.0)
            tracker.requests = tracker.requests * fade + requests
            tracker.tokens_in = tracker.tokens_in * fade + sum(arrivals.input_tokens)
            tracker.expected = tracker.expected * fade + sum(arrivals.output_tokens)
            need.input_tokens = tracker.tokens_in / tracker.requests
            if tracker.finished < t.FINISHED_MIN:
                need.output_tokens = max(1.0, sum(arrivals.output_tokens) / requests)
        if model.finished:
            # What was expected at arrival is a cautious quantile; the mean shows in those that ended.
            fade = math.exp(-model.finished / 300.0)
            tracker.finished = tracker.finished * fade + model.finished
            tracker.tokens_out = tracker.tokens_out * fade + model.finished_output_tokens
            if tracker.finished >= t.FINISHED_MIN:
                need.output_tokens = max(1.0, tracker.tokens_out / tracker.finished)
        context = context_mean_tokens(need.input_tokens, need.output_tokens)
        need.token_s = token_s = costs.step_request_s + costs.step_context_token_s * context
        need.request_s = prefill_s(costs, need.input_tokens) + need.output_tokens * token_s
        need.life_s = life_s = min(max(2.0, need.output_tokens * t.TOKEN_S), 90.0)
        fade = math.exp(-gone_s / life_s)
        tracker.decode = tracker.decode * fade + (1 - fade) * requests * need.output_tokens * token_s / gone_s
        need.decode = max(tracker.decode, model.running * token_s / (model.record.sla.tpot_ms / 1000 * t.TPOT_USED))
        tracker.load_most.span_s = max(self._keep_s, self._keep_lives * life_s * min(2, model.record.gpus))
        fade = math.exp(-gone_s / 10.0)
        need.rps = need.rps * fade + (1 - fade) * requests / gone_s
        fade = math.exp(-gone_s / t.ACTIVITY_S)
        need.running = need.running * fade + (1 - fade) * model.running
        serving = sum(1 for replica in model.replicas if replica.running) or 1
        need.activity = 1 - math.exp(-need.running / serving)
        busy = max(self._seated(now_s, model, life_s), self._soon(model, costs, need, tracker))
        need.seats = tracker.seats_most.add(now_s, t.SEATS_FACTOR * busy)
        need.kv_tokens = tracker.kv_most.add(now_s, self._kv_tokens(model, costs, need, tracker))
        ttft_ms = model.record.sla.ttft_p95_ms
        share_min = min(t.SHARE_MIN_MOST, tracker.lengths.above(t.MISSED_FREE) / (t.TTFT_USED * ttft_ms / 1000))
        need.share_min = tracker.share_most.add(now_s, share_min)
        waits = model.oldest_wait_s / (ttft_ms / 1000)
        cold = not any(replica.state is ReplicaState.READY for replica in model.replicas)
        tracker.correction.look(now_s, gone_s, model.finished, model.finished - model.within_slo, waits, cold=cold)
        need.share_floor = tracker.correction.share
        if requests or model.running or model.waiting:
            need.last_seen_s = now_s

    def _seated(self, now_s: float, model: ModelView, life_s: float) -> float:
        """Requests that should have a seat now: those that run, and a few of those that wait; where they do so for long
        because no seat is free, all but those that will have had one of the present seats before another is loaded. What
        runs just after a load is what waited for it, and tells nothing of what will run."""
        ready = [replica for replica in model.replicas if replica.state is ReplicaState.READY]
        seats = model.seats
        late = max(0.0, model.waiting - max(1, len(model.replicas)) * seats * model.load_s / life_s)
        late = min(late, max(t.QUEUE_REPLICAS_MAX, len(ready)) * seats)
        if now_s - min((replica.since_s for replica in ready), default=now_s) < max(model.load_s, life_s):
            return late
        if model.oldest_wait_s < t.LATE_S or model.running < t.SEATS_FULL_SHARE * sum(replica.slots for replica in ready):
            return model.running + min(model.waiting, 0.2 * model.running)
        return max(model.running, len(ready) * seats) + late

    def _kv_tokens(self, model: ModelView, costs: StepCosts, need: ModelNeed, tracker: _Tracker) -> float:
        """KV for what runs and waits by what it is expected to hold, for what is held, and for what will run by Little's
        law when requests go on coming as they did."""
        expected = need.input_tokens + (tracker.expected / tracker.requests if tracker.requests else need.output_tokens)
        block = model.record.block_size
        held = sum((replica.kv_pages - replica.kv_pages_free) * block for replica in model.replicas)
        busy = max(model.running + model.waiting, self._soon(model, costs, need, tracker))
        return max(held, busy * expected) * t.KV_FACTOR

    def _soon(self, model: ModelView, costs: StepCosts, need: ModelNeed, tracker: _Tracker) -> float:
        """How many requests will run at once when they go on coming as they did (Little's law)."""
        if need.token_s <= 0:
            return 0.0
        batch = need.running / max(1, len(model.replicas))
        tpot_s = (costs.step_const_s + need.token_s * batch) / max(need.share, 0.2)
        return tracker.decode / need.token_s * min(tpot_s, model.record.sla.tpot_ms / 1000)


def standing(model: ModelView, costs: StepCosts) -> float:
    """The share that each of a model's replicas eats at the time per token that plans use."""
    return standing_share(costs, model.record.sla.tpot_ms / 1000 * t.TPOT_USED)
