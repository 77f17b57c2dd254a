"""Operators' overrides and control verbs, and alerts."""

from __future__ import annotations

from enum import Enum

import msgspec

from subjects.messages.kinds import Severity


class OverrideKind(Enum):
    """What a person has said about a model (by name), a replica, a worker (by name) or ``<worker name>/<device>``."""

    PIN = "pin"
    """A model's replicas are kept from eviction, or not, whatever its record says."""
    MODE = "mode"
    """How far the scheduler may go with a model, whatever its record says."""
    MODEL_LOCK = "model-lock"
    """Nothing automatic starts, stops or changes a replica of it."""
    DEVICE_LOCK = "device-lock"
    """Nothing comes or goes there by itself."""
    REPLICA_LOCK = "replica-lock"
    """Nothing automatic stops or changes it."""
    WORKER_DRAIN = "worker-drain"
    """Nothing new goes there, and what is there leaves."""
    DEVICE_DRAIN = "device-drain"
    """The same for one device."""
    EVENT = "event"
    """Load is expected, under a name of its own."""


class DeclaredLoad(msgspec.Struct, frozen=True, kw_only=True):
    """Load that people know of beforehand (SCH-5): while it lasts so many times what it would be, and at least so much."""

    begin_unix_s: float
    end_unix_s: float
    model: str = ""
    """Empty: every model."""
    factor: float = 1.0
    at_least: float = 0.0
    """GPU-seconds of work per second."""


class Override(msgspec.Struct, frozen=True, kw_only=True):
    """One word of a person that wins over automatic decisions (SCH-11)."""

    kind: OverrideKind
    about: str
    value: str = ""
    """``pinned`` or ``unpinned``, or a mode."""
    bound_s: float | None = None
    """Of a drain: how long running requests may take to finish."""
    load: DeclaredLoad | None = None
    """Of an event."""
    at_unix_s: float = 0.0


class Overrides(msgspec.Struct, frozen=True, kw_only=True):
    """All of them, in order of kind and name (bucket ``carpool-locks``). The revision grows with every change."""

    revision: int = 0
    entries: tuple[Override, ...] = ()


class ControlRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A verb of the CLI or the web page with its JSON argument."""

    argument: bytes = b"{}"


class ControlReply(msgspec.Struct, frozen=True, kw_only=True):
    """``error`` is empty on success; ``result`` is JSON."""

    result: bytes = b"null"
    error: str = ""


class Alert(msgspec.Struct, frozen=True, kw_only=True):
    """Something a person should know, with evidence and the command that would help (OPS-3)."""

    at_unix_s: float
    severity: Severity
    kind: str
    scope: str
    text: str
    evidence: dict[str, str] = {}
    remedy: str = ""
