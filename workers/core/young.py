"""Prompts wait for young answers: how many prompt tokens the next step of an engine prefills (ops/decisions/0018).

The mean time per token of a short answer has few tokens to spread one long step over: a chunk of a prompt between its second
and its third, beside a neighbour on the same device, and it misses what its model promises. So a step prefills what fits
between the tokens of such answers, and nothing while that is too little; but no prompt waits for them longer than a share of
its own promise. Where no answer is young, a step takes as many prompt tokens as it can.

Nothing here reads a clock or knows an engine: times come in, a number goes out. ``workers.engines.vllm_turns`` asks; the
simulator's engine has the same rule and these constants.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from math import inf

STEP_TOKENS_MAX = 8192
"""Prompt tokens that one step prefills at most: vLLM's default ``max_num_batched_tokens`` for a server on an H100."""
YOUNG_TOKENS = 48
"""Answers with fewer tokens are young: one prompt prefilled between their tokens can make them miss their time per token."""
YOUNG_USED = 0.95
"""Of the time per token that young answers may use before prompts wait for them."""
YOUNG_WAIT_SHARE = 0.2
"""Of the time to the first token, how long a prompt waits for young answers at most."""
SMOOTHING = 0.2
"""Weight of the newest step in the running means of step times."""


class StepTimes:
    """What a step takes at present: the wait for its turn when it prefills, a bare step, and each prompt token."""

    def __init__(self, longest_s: float) -> None:
        """``longest_s``: what took longer counts as this long, so that one hiccup is soon forgotten."""
        self._longest_s = longest_s
        self._bare = self._with_prompts = 0
        self._bare_s = self._wait_s = self._extra_s = self._tokens = 0.0

    def took(self, wait_s: float, work_s: float, prompt_tokens: int) -> None:
        """A step waited for its turn and then ran so long; ``prompt_tokens`` were prefilled in it."""
        work_s = min(work_s, self._longest_s)
        if prompt_tokens <= 0:
            # Its wait tells nothing: a step that only decodes lets others go first.
            self._bare += 1
            self._bare_s += (work_s - self._bare_s) * _weight(self._bare)
            return
        self._with_prompts += 1
        weight = _weight(self._with_prompts)
        self._wait_s += (min(wait_s, self._longest_s) - self._wait_s) * weight
        self._extra_s += (max(0.0, work_s - self._bare_s) - self._extra_s) * weight
        self._tokens += (prompt_tokens - self._tokens) * weight

    def tokens_within(self, left_s: float) -> float:
        """Prompt tokens of a step that ends in ``left_s``, its wait included; infinite as long as none were measured."""
        left_s -= self._wait_s + self._bare_s
        if left_s <= 0.0:
            return 0.0
        return left_s * self._tokens / self._extra_s if self._extra_s else inf


class YoungAnswers:
    """What one engine knows of its requests' times, and what follows for its next step. Requests go by their names."""

    def __init__(self, *, tpot_s: float, ttft_s: float) -> None:
        """The model's promises: time per token and to the first token."""
        self._used_s = tpot_s * YOUNG_USED
        self._wait_s = ttft_s * YOUNG_WAIT_SHARE
        # Too long for every young answer; still longer makes no difference.
        self.times = StepTimes(YOUNG_TOKENS * tpot_s)
        self._came_s: dict[str, float] = {}
        self._first_s: dict[str, float] = {}

    def came(self, now_s: float, request: str) -> None:
        """The engine got a request."""
        self._came_s.setdefault(request, now_s)

    def answered(self, now_s: float, request: str) -> None:
        """It has tokens; the first call is when the first came, also for one that is computed again later."""
        self._first_s.setdefault(request, now_s)

    def keep(self, requests: Collection[str]) -> None:
        """Forgets all others."""
        for known in (self._came_s, self._first_s):
            for gone in [request for request in known if request not in requests]:
                del known[gone]

    def __len__(self) -> int:
        """Requests that it knows."""
        return len(self._came_s)

    def prompt_tokens(
        self,
        now_s: float,
        answers: Iterable[tuple[str, int]],
        prompts: Iterable[tuple[str, int]],
        *,
        least: int,
        most: int,
    ) -> int:
        """How many prompt tokens the step about to begin prefills at most; 0: it only decodes.

        Args:
            now_s: By the clock of the other calls.
            answers: Those that decode, and how many tokens each has.
            prompts: Those with something to prefill, and how many tokens of it.
            least: Fewer are not worth a step, unless they are all that is left; prompts wait until so many fit.
            most: That one step can take.
        """
        # With ``made`` tokens so far, the next one ends interval number ``made``.
        due_s = min(
            (self._first_s.get(one, now_s) + made * self._used_s for one, made in answers if 0 < made < YOUNG_TOKENS),
            default=inf,
        )
        if due_s == inf:
            return most
        left = 0
        late = False
        for request, tokens in prompts:
            left += tokens
            late = late or now_s - self._came_s.get(request, -inf) >= self._wait_s
        fit = self.times.tokens_within(due_s - now_s)
        if fit >= min(least, left):
            return int(min(fit, most))
        return min(least, most) if late else 0


def _weight(count: int) -> float:
    return max(SMOOTHING, 1.0 / count)
