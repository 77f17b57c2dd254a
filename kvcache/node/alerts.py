"""Alerts of a node, at most one a minute of each kind (OPS-3)."""

from __future__ import annotations

import time
from collections import deque
from contextlib import suppress

import structlog

from subjects import names
from subjects.bus import Bus
from subjects.codec import encode
from subjects.errors import BusError
from subjects.ids import base_name
from subjects.messages import Alert, Severity

PAUSE_S = 60.0
KINDS_MAX = 64
WAITING_MAX = 16
"""Alerts kept for a bus that is away."""

log = structlog.get_logger(__name__)


class Alerts:
    """Says what a person should know, on the bus and in the log."""

    def __init__(self, worker: str) -> None:
        self.bus: Bus | None = None
        self._worker = worker
        self._scope = base_name(worker) or worker
        self._said: dict[str, float] = {}
        self._waiting: deque[Alert] = deque(maxlen=WAITING_MAX)

    def say(self, kind: str, text: str, *, severity: Severity = Severity.WARNING, remedy: str = "", **evidence: str) -> bool:
        """Whether it was said; a kind that was said within the last minute is not."""
        now_s = time.monotonic()
        if now_s - self._said.get(kind, -PAUSE_S) < PAUSE_S or (kind not in self._said and len(self._said) >= KINDS_MAX):
            return False
        self._said[kind] = now_s
        log.warning("alert", kind=kind, text=text, **evidence)
        alert = Alert(
            at_unix_s=time.time(),
            severity=severity,
            kind=kind,
            scope=self._scope,
            text=text,
            evidence={"worker": self._worker, **evidence},
            remedy=remedy,
        )
        self._waiting.append(alert)
        self.post()
        return True

    def post(self) -> None:
        """Sends what waits for the bus."""
        if self.bus is None or not self.bus.connected:
            return
        while self._waiting:
            alert = self._waiting.popleft()
            with suppress(BusError):
                self.bus.post(names.alert(alert.severity.value, alert.kind, alert.scope), encode(alert))
