"""What the proof of capacity concludes from what it recorded: pure arithmetic on answers, samples and engine steps."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Any

from profiles.costs import work_s
from subjects.messages import StepCosts, StepSums

if TYPE_CHECKING:
    from ops.prove.workplace import Answer


@dataclass(frozen=True, slots=True)
class Sample:
    """Replicas as one look saw them; ``at_s`` is monotonic."""

    at_s: float
    replicas: tuple[tuple[str, str, str, str], ...]
    """Model, device (``worker/device``), state and name of each."""

    def ready(self, model: str) -> int:
        """Ready replicas of ``model``."""
        return sum(1 for name, _, state, _ in self.replicas if name == model and state == "ready")

    @property
    def devices(self) -> dict[str, list[str]]:
        """Models on each device that holds any, in whatever state."""
        held: dict[str, list[str]] = {}
        for model, device, state, _ in self.replicas:
            if state != "dead":
                held.setdefault(device, []).append(model)
        return held


def waits_s(answers: Sequence[Answer]) -> list[float]:
    """Seconds to each first token; of one that was refused or broken off before, until that."""
    return [answer.first_s - answer.begun_s for answer in answers]


def longest_wait_s(answers: Sequence[Answer]) -> float:
    """The longest of :func:`waits_s`; 0 without answers."""
    return max(waits_s(answers), default=0.0)


def _spans(samples: Sequence[Sample], ended_s: float) -> Iterator[tuple[Sample, float]]:
    """Each sample and when the next one took its place."""
    for number, sample in enumerate(samples, 1):
        yield sample, samples[number].at_s if number < len(samples) else ended_s


def device_seconds(samples: Sequence[Sample], ended_s: float) -> float:
    """Seconds that devices held a model in any state, all devices together."""
    return sum(len(sample.devices) * max(0.0, until_s - sample.at_s) for sample, until_s in _spans(samples, ended_s))


def static_device_seconds(samples: Sequence[Sample], ended_s: float) -> float:
    """What it takes to give each model the most replicas that it ever had, from the first sample to the end."""
    peaks: Counter[str] = Counter()
    for sample in samples:
        peaks |= Counter(model for model, _, state, _ in sample.replicas if state != "dead")
    return peaks.total() * (ended_s - samples[0].at_s) if samples else 0.0


def followed_s(samples: Sequence[Sample], model: str, since_s: float) -> float | None:
    """Seconds from ``since_s`` until ``model`` was ready, 0 if it was then; None: never. A sample holds until the next."""
    spans = _spans(samples, float("inf"))
    ready = (sample.at_s for sample, until_s in spans if until_s > since_s and sample.ready(model))
    at_s = next(ready, None)
    return None if at_s is None else max(0.0, at_s - since_s)


def attainment(answers: Sequence[Answer], ttft_s: float, tpot_s: float) -> dict[str, float]:
    """By model the share of answers that were whole, began within ``ttft_s`` and took ``tpot_s`` per further piece."""
    shares: dict[str, list[bool]] = {}
    for answer in answers:
        pace_s = (answer.ended_s - answer.first_s) / max(1, answer.pieces - 1)
        good = answer.whole and answer.first_s - answer.begun_s <= ttft_s and pace_s <= tpot_s
        shares.setdefault(answer.model, []).append(good)
    return {model: sum(goods) / len(goods) for model, goods in sorted(shares.items())}


def wait_bound_s(*, turn_s: float, answer_s: float, load_s: float, ahead: int, bound_s_max: float) -> float:
    """The longest wait where ``ahead`` other models can be before one: each has its turn, its last answers end, and the next
    is loaded."""
    return min(bound_s_max, ahead * (turn_s + answer_s + load_s))


def share_error(counts: Mapping[str, int], weights: Mapping[str, float]) -> float:
    """The largest distance between a replica's share of the answers and its share of the weights."""
    answers, whole = sum(counts.values()), sum(weights.values())
    if not answers or not whole:
        return 1.0
    return max(abs(counts.get(name, 0) / answers - weight / whole) for name, weight in sorted(weights.items()))


def cut_attempts(attempts: Sequence[Mapping[str, Any]]) -> int:
    """How often a request lost a replica that had begun with it, by its story (``carpool explain REQUEST``)."""
    return sum(1 for attempt in attempts if attempt["lost"] and attempt["begun"])


def cost_error(windows: Sequence[StepSums], costs: StepCosts) -> float | None:
    """Median over engine steps of ``|told - taken| / taken``, each window of steps counting as often as it has steps; None
    without any step."""
    errors: list[float] = []
    for window in windows:
        if window.steps > 0 and window.busy_s > 0:
            errors += [abs(work_s(costs, window) / window.busy_s - 1.0)] * window.steps
    return median(errors) if errors else None
