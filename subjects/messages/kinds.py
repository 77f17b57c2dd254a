"""Kinds that messages name: classes, lanes, endpoints, engines, devices, states."""

from __future__ import annotations

from enum import Enum


class SlaClass(Enum):
    """Service classes in falling order of value."""

    GOLD = "gold"
    SILVER = "silver"
    BRONZE = "bronze"
    BATCH = "batch"


class Lane(Enum):
    """Size lanes of a request by its KV pages; ``LANE_PAGES_MAX`` gives the ceilings."""

    SMALL = "s"
    MEDIUM = "m"
    LARGE = "l"


LANE_PAGES_MAX: dict[Lane, int] = {Lane.SMALL: 64, Lane.MEDIUM: 512}
"""Ceiling of a lane in KV pages; the large lane's ceiling is the pages of the model's longest context."""


class RequestKind(Enum):
    """Only inference counts as demand for serving replicas (ING-4)."""

    INFERENCE = "inference"
    BATCH = "batch"
    FINE_TUNE_VALIDATION = "fine-tune-validation"
    LOAD_TEST = "load-test"
    HEALTH_CHECK = "health-check"


class Endpoint(Enum):
    """Which OpenAI route a body belongs to."""

    CHAT = "chat"
    COMPLETIONS = "completions"
    EMBEDDINGS = "embeddings"


class Task(Enum):
    """What a model is for: it makes text, or one vector for each input."""

    GENERATE = "generate"
    EMBED = "embed"


TASK_OF: dict[Endpoint, Task] = {
    Endpoint.CHAT: Task.GENERATE,
    Endpoint.COMPLETIONS: Task.GENERATE,
    Endpoint.EMBEDDINGS: Task.EMBED,
}
"""Which models an endpoint is for."""


class EngineType(Enum):
    """The implementations of the engine protocol."""

    VLLM = "vllm"
    OPENAI_HTTP = "openai_http"
    SIMULATED = "simulated"


class Mode(Enum):
    """How far the scheduler may go with a model by itself (SCH-11)."""

    OBSERVE = "observe"
    ADVISE = "advise"
    ACT = "act"


class DeviceKind(Enum):
    """What a device is."""

    CPU = "cpu"
    GPU = "gpu"
    MIG = "mig"


class ReplicaState(Enum):
    """States of a replica (WRK-3)."""

    FETCHING = "fetching"
    LOADING = "loading"
    WARMING = "warming"
    READY = "ready"
    DRAINING = "draining"
    ASLEEP = "asleep"
    FAILED = "failed"
    ABSENT = "absent"


class KvTier(Enum):
    """Where a span lies; the first is the fastest."""

    ENGINE = "engine"
    HOST = "host"
    DISK = "disk"


class Severity(Enum):
    """How much an alert matters."""

    INFO = "info"
    WARNING = "warning"
    CRITICAL = "critical"
