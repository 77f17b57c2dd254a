"""What the gateway counts of its requests, per model, class, lane and business: never one line per request."""

from __future__ import annotations

from dataclasses import dataclass, field

from profiles.costs import length_class
from subjects.ids import DeploymentKey, ModelHash, RequestId
from subjects.messages import Lane, ModelDemand, RequestKind, RequestProfile, Sla, SlaClass

Key = tuple[DeploymentKey, str, str, str]
"""Deployment, class, lane, business. Names in place of enum members: each request is counted often, and theirs hash fast."""


def within_slo(sla: Sla, ttft_s: float, latency_s: float, output_tokens: int) -> bool:
    """Whether a finished request met its model's targets: the time to its first token, and the mean time per further one."""
    if ttft_s > sla.ttft_p95_ms / 1000:
        return False
    return output_tokens <= 1 or latency_s - ttft_s <= sla.tpot_ms / 1000 * (output_tokens - 1)


@dataclass(slots=True)
class _Cell:
    """``waiting`` maps to the time since when, oldest first, because a request that waits again is put at the end. The lists
    are of what arrived, by length class."""

    model_hash: ModelHash
    sla_class: SlaClass
    lane: Lane
    waiting: dict[RequestId, float] = field(default_factory=dict)
    waiting_input_tokens: int = 0
    running: int = 0
    arrived: int = 0
    finished: int = 0
    failed: int = 0
    input_tokens: int = 0
    output_tokens: int = 0
    ttft_s_sum: float = 0.0
    latency_s_sum: float = 0.0
    within_slo: int = 0
    stress: float = 0.0
    lengths: list[int] = field(default_factory=lambda: [0, 0, 0])
    lengths_input_tokens: list[int] = field(default_factory=lambda: [0, 0, 0])
    lengths_output_tokens: list[int] = field(default_factory=lambda: [0, 0, 0])

    def empty(self) -> bool:
        return not (self.waiting or self.running or self.arrived or self.finished or self.failed)


class DemandLedger:
    """Counts requests through arrived, waiting, running and ended. Health checks are no demand and are left out."""

    def __init__(self) -> None:
        self._cells: dict[Key, _Cell] = {}

    def arrived(self, profile: RequestProfile) -> None:
        """A request came in."""
        if (cell := self._cell(profile)) is not None:
            cell.arrived += 1
            length = length_class(profile.input_tokens)
            cell.lengths[length] += 1
            cell.lengths_input_tokens[length] += profile.input_tokens
            cell.lengths_output_tokens[length] += profile.expected_output_tokens

    def waits(self, profile: RequestProfile, request: RequestId, since_s: float) -> None:
        """It began to wait (again)."""
        if (cell := self._cell(profile)) is not None:
            if request not in cell.waiting:
                cell.waiting_input_tokens += profile.input_tokens
            cell.waiting[request] = since_s

    def stopped_waiting(self, profile: RequestProfile, request: RequestId) -> None:
        """It does not wait any more."""
        if (cell := self._cell(profile)) is not None and cell.waiting.pop(request, None) is not None:
            cell.waiting_input_tokens -= profile.input_tokens

    def runs(self, profile: RequestProfile, change: int) -> None:
        """One more (+1) or one less (-1) runs."""
        if (cell := self._cell(profile)) is not None:
            cell.running += change

    def finished(
        self, profile: RequestProfile, *, output_tokens: int, ttft_s: float, latency_s: float, within_slo: bool = False
    ) -> None:
        """It ended well; ``within_slo`` is what the function of that name says of it."""
        if (cell := self._cell(profile)) is not None:
            cell.finished += 1
            cell.input_tokens += profile.input_tokens
            cell.output_tokens += output_tokens
            cell.ttft_s_sum += ttft_s
            cell.latency_s_sum += latency_s
            cell.within_slo += within_slo

    def stressed(self, profile: RequestProfile, stress: float) -> None:
        """What :meth:`broker.core.requests.live.LiveRequest.stress` says of it."""
        if (cell := self._cell(profile)) is not None:
            cell.stress += stress

    def failed(self, profile: RequestProfile) -> None:
        """It ended with an error."""
        if (cell := self._cell(profile)) is not None:
            cell.failed += 1

    def take(self, now_s: float) -> tuple[ModelDemand, ...]:
        """The counts in order of key; what is counted since the last call starts again from zero."""
        rows: list[ModelDemand] = []
        cells, self._cells = self._cells, {}
        for key in sorted(cells):
            cell = cells[key]
            if cell.empty():
                continue
            rows.append(
                ModelDemand(
                    model_hash=cell.model_hash,
                    deployment=key[0],
                    sla_class=cell.sla_class,
                    lane=cell.lane,
                    business_id=key[3],
                    arrived=cell.arrived,
                    finished=cell.finished,
                    failed=cell.failed,
                    waiting=len(cell.waiting),
                    running=cell.running,
                    oldest_wait_s=max(0.0, now_s - next(iter(cell.waiting.values()))) if cell.waiting else 0.0,
                    input_tokens=cell.input_tokens,
                    output_tokens=cell.output_tokens,
                    ttft_s_sum=cell.ttft_s_sum,
                    latency_s_sum=cell.latency_s_sum,
                    arrived_lengths=_three(cell.lengths),
                    arrived_input_tokens=_three(cell.lengths_input_tokens),
                    arrived_output_tokens=_three(cell.lengths_output_tokens),
                    waiting_input_tokens=cell.waiting_input_tokens,
                    within_slo=cell.within_slo,
                    stress=cell.stress,
                )
            )
            if cell.waiting or cell.running:
                self._cells[key] = _Cell(
                    cell.model_hash,
                    cell.sla_class,
                    cell.lane,
                    waiting=cell.waiting,
                    waiting_input_tokens=cell.waiting_input_tokens,
                    running=cell.running,
                )
        return tuple(rows)

    def _cell(self, profile: RequestProfile) -> _Cell | None:
        if profile.kind is RequestKind.HEALTH_CHECK:
            return None
        key = (profile.deployment, profile.sla_class._value_, profile.lane._value_, profile.business_id)
        cell = self._cells.get(key)
        if cell is None:
            cell = self._cells[key] = _Cell(profile.model_hash, profile.sla_class, profile.lane)
        return cell


def _three(values: list[int]) -> tuple[int, int, int]:
    return values[0], values[1], values[2]
