"""What an agent and its replicas tell each other over the socket of :mod:`workers.control`."""

from __future__ import annotations

import msgspec

from subjects.messages import CostPoint, ReplicaState, StepSums
from workers.engines.base import EngineInfo
from workers.spec import ReplicaSpec

# -------------------------------------------------------------------------------------------------- agent to replica


class Start(msgspec.Struct, frozen=True, kw_only=True, tag="start"):
    """The first message to an exec'd replica. The spec may hold credentials: never log it."""

    spec: ReplicaSpec


class Ping(msgspec.Struct, frozen=True, kw_only=True, tag="ping"):
    """Answer with the same number."""

    number: int


class Drain(msgspec.Struct, frozen=True, kw_only=True, tag="drain"):
    """Stop pulling, finish what runs within ``timeout_s``, give the rest back, then answer ``Drained``."""

    timeout_s: float


class Concurrency(msgspec.Struct, frozen=True, kw_only=True, tag="concurrency"):
    """Run at most ``slots`` requests at once; those over it finish."""

    slots: int


class Resize(msgspec.Struct, frozen=True, kw_only=True, tag="resize"):
    """Give the engine another KV budget and answer ``Changed``; while pages that would go are in use, it is refused."""

    number: int
    kv_bytes: int


class Sleep(msgspec.Struct, frozen=True, kw_only=True, tag="sleep"):
    """After ``Drained``: free the device's memory, and answer ``Changed``."""

    number: int
    level: int


class Wake(msgspec.Struct, frozen=True, kw_only=True, tag="wake"):
    """After a sleep: come back, warm up, and answer as after a load."""


class EmptyPrefixes(msgspec.Struct, frozen=True, kw_only=True, tag="empty-prefixes"):
    """Let the engine drop its own prefix cache if nothing runs and it can; not answered."""


class Stop(msgspec.Struct, frozen=True, kw_only=True, tag="stop"):
    """Stop the engine and exit with code 0; running requests are given back."""


ToReplica = Start | Ping | Drain | Concurrency | Resize | Sleep | Wake | EmptyPrefixes | Stop

# -------------------------------------------------------------------------------------------------- replica to agent


class Pong(msgspec.Struct, frozen=True, kw_only=True, tag="pong"):
    """The event loop of the replica runs."""

    number: int


class Progress(msgspec.Struct, frozen=True, kw_only=True, tag="progress"):
    """A step of the load: ``state`` is FETCHING, LOADING or WARMING; ``progress`` is a share from 0 to 1."""

    state: ReplicaState
    detail: str = ""
    progress: float = 0.0


class Ready(msgspec.Struct, frozen=True, kw_only=True, tag="ready"):
    """The warm-up answered sanely and tickets are pulled; only after WARMING was reported."""

    info: EngineInfo


class Load(msgspec.Struct, frozen=True, kw_only=True, tag="load"):
    """What runs now; ``idle_s`` is the time since the last request was held (0 while one is)."""

    running: int
    waiting: int
    kv_pages_free: int
    idle_s: float = 0.0
    busy_s: float = 0.0
    """Seconds since the engine's start in which a step ran; 0 from an engine that does not tell."""
    preemptions: int = 0
    step_s: float = 0.0
    hit_ratio: float | None = None
    sums: StepSums | None = None


class Drained(msgspec.Struct, frozen=True, kw_only=True, tag="drained"):
    """Nothing runs and nothing is pulled; every request was confirmed. ``given_back`` requests did not finish in time."""

    given_back: int = 0


class Changed(msgspec.Struct, frozen=True, kw_only=True, tag="changed"):
    """The answer to ``Resize`` and ``Sleep``; ``failure`` is empty when it was done, and nothing changed when it is not."""

    number: int
    failure: str = ""
    kv_pages: int = 0
    """Of the whole replica, after it."""


class Measured(msgspec.Struct, frozen=True, kw_only=True, tag="measured"):
    """What steps took when nothing else ran here; ``whole``: there is no more to measure."""

    points: tuple[CostPoint, ...]
    whole: bool = False


class Failed(msgspec.Struct, frozen=True, kw_only=True, tag="failed"):
    """The engine failed, in one line a person can act on; the process exits after this."""

    detail: str


ToAgent = Pong | Progress | Ready | Load | Drained | Changed | Measured | Failed
