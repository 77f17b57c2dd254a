"""Every message that crosses a process boundary (BUS-1).

All are frozen, keyword-only msgspec structs carried as MessagePack maps. New fields get defaults, so that an older peer can
still be understood; unknown fields of a newer peer are ignored. Times named ``*_unix_s`` are wall-clock seconds; a duration
or age is relative to the moment of sending, since clocks of two machines differ. Tokens, pages and bytes are integers.
"""

from subjects.messages.commands import (
    Command as Command,
)
from subjects.messages.commands import (
    CommandOutcome as CommandOutcome,
)
from subjects.messages.commands import (
    CommandReply as CommandReply,
)
from subjects.messages.commands import (
    CostsMeasured as CostsMeasured,
)
from subjects.messages.commands import (
    DrainReplica as DrainReplica,
)
from subjects.messages.commands import (
    EvictKv as EvictKv,
)
from subjects.messages.commands import (
    LoadModel as LoadModel,
)
from subjects.messages.commands import (
    MigrateKv as MigrateKv,
)
from subjects.messages.commands import (
    OperationEnded as OperationEnded,
)
from subjects.messages.commands import (
    OperationProgressed as OperationProgressed,
)
from subjects.messages.commands import (
    ReplicaDied as ReplicaDied,
)
from subjects.messages.commands import (
    ResizeKv as ResizeKv,
)
from subjects.messages.commands import (
    SetConcurrency as SetConcurrency,
)
from subjects.messages.commands import (
    SleepReplica as SleepReplica,
)
from subjects.messages.commands import (
    UnloadReplica as UnloadReplica,
)
from subjects.messages.commands import (
    WakeReplica as WakeReplica,
)
from subjects.messages.commands import (
    WorkerCommand as WorkerCommand,
)
from subjects.messages.commands import (
    WorkerEvent as WorkerEvent,
)
from subjects.messages.journal import (
    JournalEntry as JournalEntry,
)
from subjects.messages.journal import (
    JournalRecord as JournalRecord,
)
from subjects.messages.journal import (
    KvOrder as KvOrder,
)
from subjects.messages.journal import (
    Lease as Lease,
)
from subjects.messages.journal import (
    StepEnded as StepEnded,
)
from subjects.messages.journal import (
    StepSent as StepSent,
)
from subjects.messages.journal import (
    TransactionBegan as TransactionBegan,
)
from subjects.messages.journal import (
    TransactionEnded as TransactionEnded,
)
from subjects.messages.kinds import (
    LANE_PAGES_MAX as LANE_PAGES_MAX,
)
from subjects.messages.kinds import (
    TASK_OF as TASK_OF,
)
from subjects.messages.kinds import (
    DeviceKind as DeviceKind,
)
from subjects.messages.kinds import (
    Endpoint as Endpoint,
)
from subjects.messages.kinds import (
    EngineType as EngineType,
)
from subjects.messages.kinds import (
    KvTier as KvTier,
)
from subjects.messages.kinds import (
    Lane as Lane,
)
from subjects.messages.kinds import (
    Mode as Mode,
)
from subjects.messages.kinds import (
    ReplicaState as ReplicaState,
)
from subjects.messages.kinds import (
    RequestKind as RequestKind,
)
from subjects.messages.kinds import (
    Severity as Severity,
)
from subjects.messages.kinds import (
    SlaClass as SlaClass,
)
from subjects.messages.kinds import (
    Task as Task,
)
from subjects.messages.kv import (
    KvAsk as KvAsk,
)
from subjects.messages.kv import (
    KvIndexed as KvIndexed,
)
from subjects.messages.kv import (
    KvModelSpans as KvModelSpans,
)
from subjects.messages.kv import (
    KvOffer as KvOffer,
)
from subjects.messages.kv import (
    KvSnapshot as KvSnapshot,
)
from subjects.messages.kv import (
    KvSpan as KvSpan,
)
from subjects.messages.operator import (
    Alert as Alert,
)
from subjects.messages.operator import (
    ControlReply as ControlReply,
)
from subjects.messages.operator import (
    ControlRequest as ControlRequest,
)
from subjects.messages.operator import (
    DeclaredLoad as DeclaredLoad,
)
from subjects.messages.operator import (
    Override as Override,
)
from subjects.messages.operator import (
    OverrideKind as OverrideKind,
)
from subjects.messages.operator import (
    Overrides as Overrides,
)
from subjects.messages.registry import Adapter as Adapter
from subjects.messages.registry import CostPoint as CostPoint
from subjects.messages.registry import KeptCosts as KeptCosts
from subjects.messages.registry import ModelRecord as ModelRecord
from subjects.messages.registry import Sla as Sla
from subjects.messages.registry import StepCosts as StepCosts
from subjects.messages.registry import StepSums as StepSums
from subjects.messages.request import (
    Back as Back,
)
from subjects.messages.request import (
    Cancel as Cancel,
)
from subjects.messages.request import (
    Claim as Claim,
)
from subjects.messages.request import (
    ClaimReply as ClaimReply,
)
from subjects.messages.request import (
    Delta as Delta,
)
from subjects.messages.request import (
    Failure as Failure,
)
from subjects.messages.request import (
    FailureKind as FailureKind,
)
from subjects.messages.request import (
    Frames as Frames,
)
from subjects.messages.request import (
    Gone as Gone,
)
from subjects.messages.request import (
    Grant as Grant,
)
from subjects.messages.request import (
    Hand as Hand,
)
from subjects.messages.request import (
    Held as Held,
)
from subjects.messages.request import (
    HeldEntry as HeldEntry,
)
from subjects.messages.request import (
    InferFrame as InferFrame,
)
from subjects.messages.request import (
    InferRequest as InferRequest,
)
from subjects.messages.request import (
    Refusal as Refusal,
)
from subjects.messages.request import (
    RefusalReason as RefusalReason,
)
from subjects.messages.request import (
    RequestAttempt as RequestAttempt,
)
from subjects.messages.request import (
    RequestProfile as RequestProfile,
)
from subjects.messages.request import (
    RequestStory as RequestStory,
)
from subjects.messages.request import (
    Resend as Resend,
)
from subjects.messages.request import (
    Room as Room,
)
from subjects.messages.request import (
    Ticket as Ticket,
)
from subjects.messages.request import (
    Usage as Usage,
)
from subjects.messages.telemetry import (
    KV_STARTS as KV_STARTS,
)
from subjects.messages.telemetry import (
    DeviceReport as DeviceReport,
)
from subjects.messages.telemetry import (
    IngressTelemetry as IngressTelemetry,
)
from subjects.messages.telemetry import (
    KvModelReport as KvModelReport,
)
from subjects.messages.telemetry import (
    KvReport as KvReport,
)
from subjects.messages.telemetry import (
    KvTierReport as KvTierReport,
)
from subjects.messages.telemetry import (
    ModelDemand as ModelDemand,
)
from subjects.messages.telemetry import (
    PoolDigest as PoolDigest,
)
from subjects.messages.telemetry import (
    PoolKv as PoolKv,
)
from subjects.messages.telemetry import (
    PoolModel as PoolModel,
)
from subjects.messages.telemetry import (
    PoolReplica as PoolReplica,
)
from subjects.messages.telemetry import (
    ReplicaReport as ReplicaReport,
)
from subjects.messages.telemetry import (
    TimelineEntry as TimelineEntry,
)
from subjects.messages.telemetry import (
    WorkerBeat as WorkerBeat,
)
from subjects.messages.telemetry import (
    WorkerSnapshot as WorkerSnapshot,
)
