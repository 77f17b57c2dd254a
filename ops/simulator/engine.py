"""An engine with continuous batching that advances from event to event, in closed form.

It is the engine of ``workers.core.simulated`` (whose step-by-step run it reproduces; a test compares the two) made fast
enough for a million requests. Every step decodes all running requests by one token and prefills the oldest prompts that are
not computed yet, up to a budget of tokens. A step that decodes ``batch`` requests holding ``context`` tokens takes
``step_const_s + step_request_s * batch + step_context_token_s * context``, and each prompt adds its prefill time
(``profiles.costs``). While nobody joins or leaves, the batch stays the same and the context grows by ``batch`` each step, so
``n`` steps take ``n * first + slope * n * (n - 1) / 2``: one *segment*. A segment ends at the earliest finish (known as a
step number when a request starts to decode), when pages run out, after one step where something is prefilled, or early, at
the end of the step during which somebody comes.

Pages: a request holds what its context and the next token need, prompt pages from its admission on. When a step needs more
pages than are free, the youngest request gives its pages back and waits at the head; it is computed again later.

Times inside are *work seconds*: seconds of an engine that has its devices for itself. ``rate`` turns them into time.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from heapq import heappop, heappush
from math import inf, sqrt

from ops.simulator.types import BLOCK_TOKENS, SLOTS_MAX
from subjects.messages import StepCosts
from workers.core.young import STEP_TOKENS_MAX, YOUNG_TOKENS, YOUNG_USED, YOUNG_WAIT_SHARE

WANTS = (0.02, 0.03, 0.04, 0.05, 0.07, 0.1, 0.14, 0.2, 0.28, 0.4, 0.56, 0.8, 1.0)
"""What an engine can ask of its devices' time, in steps, so that its neighbours' rates do not change at every request."""


class Sequence:
    """One request at one engine. ``made`` counts the output tokens it had when it last waited or was prefilled."""

    __slots__ = (
        "added_s",
        "base",
        "engine",
        "finish_step",
        "first_s",
        "index",
        "input_tokens",
        "made",
        "output_tokens",
        "pages",
        "prefill_left",
    )

    def __init__(self, index: int, input_tokens: int, output_tokens: int, made: int = 0) -> None:
        self.index = index
        """The caller's number of it, unique within an engine."""
        self.input_tokens = input_tokens
        self.output_tokens = output_tokens
        """Of the whole answer, at least one more than ``made``."""
        self.made = made
        self.added_s = 0.0
        """When its engine got it."""
        self.first_s = -1.0
        """When the first token came; negative before."""
        self.engine: Engine | None = None
        self.prefill_left = 0
        self.pages = 0
        """Held while it is prefilled; those of decoding ones follow from their context."""
        self.finish_step = -1
        """The engine's step at whose end it is complete; negative while it does not decode."""
        self.base = 0
        """Its context less the engine's step count, constant while it decodes."""


class Engine:
    """One replica's engine. After every call look at :attr:`end_s`: :meth:`step` is due then."""

    __slots__ = (
        "_aborted",
        "_bases",
        "_batch",
        "_block",
        "_chunk",
        "_const_s",
        "_context",
        "_context_token_s",
        "_done_w",
        "_finishes",
        "_first_w",
        "_order",
        "_pace_s",
        "_phases",
        "_prefill_pages",
        "_prefill_token2_s",
        "_prefill_token_s",
        "_prefilling",
        "_prefills",
        "_request_s",
        "_running",
        "_seg_steps",
        "_seg_w",
        "_slope_w",
        "_steps",
        "_sync_s",
        "_tpot_s",
        "_ttft_s",
        "_waiting",
        "_worked_w",
        "_young",
        "active",
        "backlog_tokens",
        "end_s",
        "finished",
        "kv_pages",
        "number",
        "preempted",
        "rate",
        "slots",
        "version",
        "want",
    )

    def __init__(
        self,
        costs: StepCosts,
        *,
        kv_pages: int,
        slots: int = SLOTS_MAX,
        chunk_tokens: int = STEP_TOKENS_MAX,
        block_tokens: int = BLOCK_TOKENS,
        factor: float = 1.0,
        number: int = 0,
        pace_s: float = 0.0,
        tpot_s: float = 0.0,
        ttft_s: float = 0.0,
    ) -> None:
        """``factor`` multiplies all times: how far this device is from its profile. While it only decodes, a step each
        ``pace_s`` is all that it asks for beside others; 0: it always asks for all. With the promises ``tpot_s`` and
        ``ttft_s`` prompts wait a little for young answers that would miss theirs; 0: they do not."""
        self.number = number
        """The caller's; breaks ties."""
        self.kv_pages = kv_pages
        self.slots = slots
        self._chunk = chunk_tokens
        self._pace_s = pace_s
        self._tpot_s = tpot_s * YOUNG_USED
        self._ttft_s = ttft_s * YOUNG_WAIT_SHARE
        self._young: list[Sequence] = []
        self._block = block_tokens
        self._const_s = costs.step_const_s * factor
        self._request_s = costs.step_request_s * factor
        self._context_token_s = costs.step_context_token_s * factor
        self._prefill_token_s = costs.prefill_token_s * factor
        self._prefill_token2_s = costs.prefill_token2_s * factor
        self.want = 1.0
        """Share of its devices' time that it asks for, one of ``WANTS``."""
        self.rate = 1.0
        self.end_s = inf
        """When :meth:`step` is due; infinite while there is nothing to do."""
        self.version = 0
        """Grows with every change of ``end_s``, so that an older entry in a heap is known to be void."""
        self.active = False
        """Whether a step runs."""
        self.backlog_tokens = 0
        """Tokens not yet prefilled of all that is here."""
        self.preempted = 0
        self.finished: list[Sequence] = []
        """Those that the last :meth:`step` completed; the caller empties it."""
        self._waiting: deque[Sequence] = deque()
        self._running: dict[int, Sequence] = {}
        """In order of admission."""
        self._prefilling: list[Sequence] = []
        """Of the running ones those not yet computed, in order of admission."""
        self._prefills: list[tuple[Sequence, int]] = []
        """Of the step that runs."""
        self._aborted: list[Sequence] = []
        self._finishes: list[tuple[int, int, Sequence]] = []
        """Heap over the step of completion; an entry whose step is not its sequence's any more is void."""
        self._order = 0
        self._steps = 0
        """Steps made so far."""
        self._batch = 0
        self._context = 0
        """Sum over the decoding ones, after ``_steps``."""
        self._phases = [0] * block_tokens
        """How many decoding ones have each ``base % block``: who needs a page at which step."""
        self._prefill_pages = 0
        # The segment that runs: its steps, its length and how much of that was done at _sync_s.
        self._seg_steps = 0
        self._seg_w = 0.0
        self._first_w = 0.0
        self._slope_w = 0.0
        self._done_w = 0.0
        self._sync_s = 0.0
        self._worked_w = 0.0
        """Of the segments before."""

    # ------------------------------------------------------------------------------------------------------------ reads

    @property
    def running(self) -> int:
        """Requests here that hold a slot."""
        return len(self._running)

    @property
    def waiting(self) -> int:
        """Requests here that wait for a slot or pages."""
        return len(self._waiting)

    @property
    def held(self) -> int:
        """All requests here."""
        return len(self._running) + len(self._waiting)

    @property
    def kv_pages_free(self) -> int:
        """Pages that nobody holds, as of the last event."""
        return self.kv_pages - self._pages_held()

    @property
    def kv_pages_open(self) -> int:
        """About as many, and quicker: those that decode are taken to be in the middle of their last page."""
        block = self._block
        return self.kv_pages - self._prefill_pages - (self._context + self._batch * (block // 2)) // block

    def sequences(self) -> list[Sequence]:
        """All requests here, in order of admission and then of waiting."""
        return [*self._running.values(), *self._waiting]

    def work_by_s(self, now_s: float) -> float:
        """Work seconds so far: the time in which it ran, less where it shared its devices."""
        if not self.active:
            return self._worked_w
        return self._worked_w + min(self._seg_w, self._done_w + (now_s - self._sync_s) * self.rate)

    def step_s(self) -> float:
        """How long a step with the present batch takes, in work seconds."""
        return self._const_s + self._request_s * self._batch + self._context_token_s * self._context

    # ----------------------------------------------------------------------------------------------------------- events

    def add(self, now_s: float, sequence: Sequence) -> None:
        """Gives it a request; it joins at the end of the step that runs. Its whole context must fit ``kv_pages``."""
        sequence.engine = self
        sequence.added_s = now_s
        self._waiting.append(sequence)
        self.backlog_tokens += sequence.input_tokens + sequence.made
        if not self.active:
            self._begin(now_s)
        elif len(self._running) < self.slots and len(self._waiting) == 1:
            self._end_early(now_s)

    def step(self, now_s: float) -> None:
        """The segment is over: tokens come out, those complete leave (into :attr:`finished`), the next segment begins."""
        self._worked_w += self._seg_w
        steps = self._steps = self._steps + self._seg_steps
        self._context += self._batch * self._seg_steps
        if self._aborted:
            self._drop_aborted()
        finishes = self._finishes
        if finishes and finishes[0][0] <= steps:
            self._complete(steps)
        if self._prefills:
            self._end_prefills(now_s, steps)
        self._begin(now_s)

    def abort(self, now_s: float, sequence: Sequence) -> None:
        """Nobody wants it any more; a running one leaves at the end of the step that runs."""
        sequence.engine = None
        if sequence.index in self._running:
            self._aborted.append(sequence)
            self._end_early(now_s)
        else:
            self._waiting.remove(sequence)
            self.backlog_tokens -= sequence.input_tokens + sequence.made

    def set_rate(self, now_s: float, rate: float) -> None:
        """From now on it gets this share of its devices' time."""
        if rate == self.rate:
            return
        if self.active:
            self._done_w += (now_s - self._sync_s) * self.rate
            self._sync_s = now_s
            self.end_s = now_s + max(0.0, self._seg_w - self._done_w) / rate
            self.version += 1
        self.rate = rate

    def resize(self, now_s: float, kv_pages: int) -> None:
        """Another number of pages, from the end of the running step on; the youngest give way if they are fewer."""
        self.kv_pages = kv_pages
        self._end_early(now_s)

    def set_slots(self, now_s: float, slots: int) -> None:
        """Runs at most ``slots`` at once; those over it finish."""
        self.slots = slots
        self._end_early(now_s)

    def take_all(self, now_s: float) -> list[Sequence]:
        """Ends all work at once. What it held, oldest first, with ``made`` telling the tokens of complete steps."""
        if self.active:
            self._worked_w = self.work_by_s(now_s)
            ran = self._steps_by(now_s, begun=False)
            self._steps += ran
            self._context += self._batch * ran
        taken = [sequence for sequence in self._running.values() if sequence.engine is self]
        for sequence in self._running.values():
            if sequence.finish_step >= 0:
                sequence.made = sequence.output_tokens - max(1, sequence.finish_step - self._steps)
                sequence.finish_step = -1
        taken.extend(self._waiting)
        for sequence in taken:
            sequence.engine = None
            sequence.prefill_left = sequence.pages = 0
        self._running.clear()
        self._waiting.clear()
        self._finishes.clear()
        self._prefilling.clear()
        self._prefills = []
        self._aborted.clear()
        self._young.clear()
        self._phases = [0] * self._block
        self._batch = self._context = self._prefill_pages = self.backlog_tokens = 0
        self._rest()
        return taken

    # --------------------------------------------------------------------------------------------------------- segments

    def _begin(self, now_s: float) -> None:
        """Admits who can be admitted and plans the steps until the next event."""
        if self._waiting:
            self._admit()
        batch = self._batch
        # Quick bounds first: exact pages are needed only near exhaustion.
        block = self._block
        room = block * (self.kv_pages - self._prefill_pages) - self._context - block * batch
        if room < block * batch:
            self._give_way()
            batch = self._batch
            room = block * (self.kv_pages - self._prefill_pages) - self._context - block * batch
        first_w = self._const_s + self._request_s * batch + self._context_token_s * self._context
        if self._prefilling:
            chunk = self._chunk
            if self._tpot_s:
                chunk = self._patience(now_s, first_w)
            if chunk == 0:
                steps = 1
                seg_w = first_w
                self.want = WANTS[bisect_left(WANTS, first_w / self._pace_s)] if first_w < self._pace_s else 1.0
            else:
                left = chunk
                prefills = []
                token_s, token2_s = self._prefill_token_s, self._prefill_token2_s
                seg_w = first_w
                for sequence in self._prefilling:
                    tokens = sequence.prefill_left
                    if tokens > left:
                        tokens = left
                    left -= tokens
                    prefills.append((sequence, tokens))
                    done = sequence.input_tokens + sequence.made - sequence.prefill_left
                    seg_w += token_s * tokens + token2_s * tokens * (2 * done + tokens)
                    if not left:
                        break
                self._prefills = prefills
                self.want = 1.0
                steps = 1
            self._slope_w = 0.0
        elif batch:
            finishes = self._finishes
            while finishes[0][2].finish_step != finishes[0][0]:
                heappop(finishes)
            steps = finishes[0][0] - self._steps
            if room < batch * (steps + block):
                steps = self._steps_with_pages(steps)
            self.want = WANTS[bisect_left(WANTS, first_w / self._pace_s)] if first_w < self._pace_s else 1.0
            slope_w = self._slope_w = self._context_token_s * batch
            seg_w = steps * first_w + slope_w * (steps * (steps - 1) * 0.5)
        else:
            self._rest()
            return
        self.active = True
        self._first_w = first_w
        self._seg_steps = steps
        self._seg_w = seg_w
        self._done_w = 0.0
        self._sync_s = now_s
        self.end_s = now_s + seg_w / self.rate
        self.version += 1

    def _patience(self, now_s: float, first_w: float) -> int:
        """How many prompt tokens the next step may prefill so that no young answer misses its time per token: as many as a
        step can, a few at least, or none for now where prompts can wait."""
        steps = self._steps
        young = self._young = [
            one
            for one in self._young
            if one.finish_step >= 0 and one.engine is self and one.output_tokens - (one.finish_step - steps) < YOUNG_TOKENS
        ]
        if not young:
            return STEP_TOKENS_MAX
        tpot_s = self._tpot_s
        due_s = inf
        for one in young:
            # It has so many tokens: the next one ends as many times between tokens.
            made = one.output_tokens - (one.finish_step - steps)
            next_s = one.first_s + made * tpot_s
            if next_s < due_s:
                due_s = next_s
        free = ((due_s - now_s) * self.rate - first_w) / self._prefill_token_s
        if free >= self._chunk:
            return min(int(free), STEP_TOKENS_MAX)
        if now_s - self._prefilling[0].added_s > self._ttft_s:
            return self._chunk
        return 0

    def _rest(self) -> None:
        self.active = False
        self._seg_steps = 0
        self._seg_w = 0.0
        self.end_s = inf
        self.version += 1

    def _end_early(self, now_s: float) -> None:
        """Ends the segment with the step that runs at ``now_s``."""
        if not self.active or self._seg_steps == 1:
            return
        steps = self._steps_by(now_s, begun=True)
        if steps >= self._seg_steps:
            return
        self._seg_steps = steps
        self._seg_w = steps * self._first_w + self._slope_w * (steps * (steps - 1) * 0.5)
        self.end_s = self._sync_s + (self._seg_w - self._done_w) / self.rate
        self.version += 1

    def _steps_by(self, now_s: float, *, begun: bool) -> int:
        """Steps of this segment that were begun, or complete, by ``now_s``: at least one, or at least none."""
        gone_w = self._done_w + (now_s - self._sync_s) * self.rate
        if self._seg_steps == 1:
            return 1 if begun or gone_w >= self._seg_w else 0
        first, half = self._first_w, self._slope_w * 0.5
        # half n^2 + (first - half) n = gone, in the form that stays exact where half is tiny.
        linear = first - half
        steps = int(2.0 * gone_w / (linear + sqrt(linear * linear + 4.0 * half * gone_w)))
        while steps * first + half * (steps * (steps - 1)) < gone_w:
            steps += 1
        while steps and (steps - 1) * first + half * ((steps - 1) * (steps - 2)) >= gone_w:
            steps -= 1
        # Now the smallest number of steps that reach ``gone_w``.
        if begun:
            return max(1, steps)
        return steps if steps * first + half * (steps * (steps - 1)) <= gone_w else steps - 1

    # -------------------------------------------------------------------------------------------- who joins, who leaves

    def _admit(self) -> None:
        """First come, first served: the head waits for its slot and pages, and nobody overtakes it."""
        waiting = self._waiting
        block = self._block
        free = -1
        while waiting and len(self._running) < self.slots:
            sequence = waiting[0]
            context = sequence.input_tokens + sequence.made
            pages = -(-(context + 1) // block)
            if free < 0:
                free = max(0, self.kv_pages - self._pages_held())
            if pages > free:
                return
            free -= pages
            waiting.popleft()
            sequence.pages = pages
            sequence.prefill_left = context
            self._prefill_pages += pages
            self._running[sequence.index] = sequence
            self._prefilling.append(sequence)

    def _end_prefills(self, now_s: float, steps: int) -> None:
        done = 0
        for sequence, tokens in self._prefills:
            if sequence.prefill_left == 0:
                continue  # Gave way or was aborted.
            sequence.prefill_left -= tokens
            self.backlog_tokens -= tokens
            if sequence.prefill_left:
                continue
            done += 1
            self._prefill_pages -= sequence.pages
            sequence.pages = 0
            sequence.made += 1
            if sequence.first_s < 0.0:
                sequence.first_s = now_s
            left = sequence.output_tokens - sequence.made
            if left <= 0:
                del self._running[sequence.index]
                sequence.engine = None
                self.finished.append(sequence)
                continue
            context = sequence.input_tokens + sequence.made
            base = sequence.base = context - steps
            self._phases[base % self._block] += 1
            self._batch += 1
            self._context += context
            self._order += 1
            sequence.finish_step = steps + left
            heappush(self._finishes, (steps + left, self._order, sequence))
            if self._tpot_s and sequence.made < YOUNG_TOKENS:
                self._young.append(sequence)
        self._prefills = []
        if done:
            if done == len(self._prefilling):
                self._prefilling.clear()
            else:
                self._prefilling = [sequence for sequence in self._prefilling if sequence.prefill_left]

    def _complete(self, steps: int) -> None:
        finishes = self._finishes
        while finishes and finishes[0][0] <= steps:
            step, _, sequence = heappop(finishes)
            if sequence.finish_step != step:
                continue
            self._leave_batch(sequence)
            sequence.made = sequence.output_tokens
            del self._running[sequence.index]
            sequence.engine = None
            self.finished.append(sequence)

    def _leave_batch(self, sequence: Sequence) -> None:
        self._batch -= 1
        self._context -= sequence.base + self._steps
        self._phases[sequence.base % self._block] -= 1
        sequence.finish_step = -1

    def _drop_aborted(self) -> None:
        for sequence in self._aborted:
            if self._running.pop(sequence.index, None) is None:
                continue
            if sequence.finish_step >= 0:
                self._leave_batch(sequence)
            else:
                self._stop_prefill(sequence)
        self._aborted.clear()

    def _stop_prefill(self, sequence: Sequence) -> None:
        self._prefilling.remove(sequence)
        self._prefill_pages -= sequence.pages
        self.backlog_tokens -= sequence.prefill_left
        sequence.prefill_left = sequence.pages = 0

    # ------------------------------------------------------------------------------------------------------------ pages

    def _pages_held(self) -> int:
        """What all running ones hold before the next step's growth: a decoding one has room for exactly its context."""
        if not self._batch:
            return self._prefill_pages
        block = self._block
        steps = self._steps
        padding = 0
        for phase, count in enumerate(self._phases):
            if count:
                padding += count * (-(phase + steps) % block)
        return self._prefill_pages + (self._context + padding) // block

    def _steps_with_pages(self, steps_max: int) -> int:
        """Of the next steps, as many as the free pages allow; at least one, since the first was made possible before."""
        free = self.kv_pages - self._pages_held()
        block = self._block
        phases = self._phases
        cycles = free // self._batch  # In ``block`` steps everybody needs exactly one page.
        steps = cycles * block
        free -= cycles * self._batch
        while steps < steps_max:
            free -= phases[-(self._steps + steps) % block]
            if free < 0:
                break
            steps += 1
        return max(1, min(steps, steps_max))

    def _give_way(self) -> None:
        """Makes the next step possible: in order of admission each takes the page it needs, or the youngest gives way."""
        free = self.kv_pages - self._pages_held()
        block = self._block
        if free >= self._phases[-self._steps % block]:
            return
        while free < 0 and self._running:
            free += self._preempt_youngest()
        for sequence in list(self._running.values()):
            if sequence.finish_step < 0 or (sequence.base + self._steps) % block:
                continue
            while free < 1 and sequence.finish_step >= 0:
                free += self._preempt_youngest()
            if sequence.finish_step >= 0:
                free -= 1

    def _preempt_youngest(self) -> int:
        """Puts it back to the head of those that wait; returns the pages that it held."""
        index = next(reversed(self._running))
        sequence = self._running.pop(index)
        self.preempted += 1
        if sequence.finish_step >= 0:
            sequence.made = sequence.output_tokens - (sequence.finish_step - self._steps)
            context = sequence.base + self._steps
            self._leave_batch(sequence)
            pages = -(-context // self._block)
        else:
            pages = sequence.pages
            self._stop_prefill(sequence)
            context = sequence.input_tokens + sequence.made
        self._waiting.appendleft(sequence)
        self.backlog_tokens += context
        return pages
