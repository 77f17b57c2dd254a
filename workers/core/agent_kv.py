"""What the agent core knows of its worker's KV node: how it is, and what it was asked for.

The node is another process, which the shell starts, asks and ends. An operation about KV ends with the node's answer, with
its own bound, or with the agent.
"""

from __future__ import annotations

import math

from subjects.ids import OperationId, WorkerId
from subjects.messages import KV_STARTS, EvictKv, KvReport, MigrateKv

KV_ANSWER_GRACE_S = 5.0
"""How much longer than its own bound an operation may take to be answered by the shell."""
KV_TIMEOUT_S_MAX = 3600.0
KV_RUNNING_MAX = 16
"""Operations about KV at once; each keeps a disk or a link busy."""

KvCommand = EvictKv | MigrateKv


class KvDesk:
    """The node's last report, and the operations that wait for it."""

    def __init__(self, worker: WorkerId, *, enabled: bool) -> None:
        self._worker = worker
        self.report = KvReport(running=False, note=KV_STARTS) if enabled else None
        """None: this worker has no node."""
        self._running: dict[OperationId, tuple[KvCommand, float]] = {}

    def refusal(self, command: KvCommand) -> str:
        """Why a command cannot be applied; empty when it can."""
        if self.report is None:
            return "this worker keeps no KV outside its engines (it was started with --no-kv)"
        if not command.kv_signature:
            return "kv_signature: is missing; it says whose KV is meant"
        if isinstance(command, EvictKv):
            if not 0 < command.ratio <= 1:
                return f"ratio {command.ratio:g}: use more than 0 and at most 1"
        elif command.source_worker is None:
            return "source_worker: is missing; it says from where"
        elif command.source_worker == self._worker:
            return "source_worker: is this worker itself"
        if not 0 < command.timeout_s <= KV_TIMEOUT_S_MAX:
            return f"timeout_s {command.timeout_s:g}: use more than 0 and at most {KV_TIMEOUT_S_MAX:g}"
        if not self.report.running:
            return f"the KV node of this worker does not run ({self.report.note}); try again in a moment"
        if len(self._running) >= KV_RUNNING_MAX:
            return f"{KV_RUNNING_MAX} operations about KV run already"
        return ""

    def begin(self, now_s: float, command: KvCommand) -> None:
        """The node is asked now."""
        self._running[command.operation] = command, now_s + command.timeout_s + KV_ANSWER_GRACE_S

    def ended(self, operation: OperationId) -> KvCommand | None:
        """The node has answered this; None when nobody waits for it (any more)."""
        return self._running.pop(operation, (None, 0.0))[0]

    def overdue(self, now_s: float) -> list[OperationId]:
        """Those that were not answered in time, oldest first."""
        return [operation for operation, (_, due_s) in self._running.items() if now_s >= due_s]

    def running(self) -> list[OperationId]:
        """Those that wait for an answer, oldest first."""
        return list(self._running)

    @property
    def next_wake_s(self) -> float:
        """When one of them is overdue."""
        return min((due_s for _, due_s in self._running.values()), default=math.inf)
