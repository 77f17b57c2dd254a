"""Why an agent refuses a command, in words that a person can act on. Reads only, so that asking changes nothing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import assert_never

from profiles.budget import with_kv
from subjects import messages as m
from subjects.ids import ReplicaId, base_name, is_token
from workers.core.agent_devices import DeviceLedger
from workers.core.agent_events import AgentSettings
from workers.core.agent_kv import KvDesk
from workers.core.agent_replica import SERVING_STATES, Process, Replica

REPLICAS_MAX = 128
LOAD_TIMEOUT_S_MAX = 3600.0
DRAIN_TIMEOUT_S_MAX = 3600.0


class Refusals:
    """Looks at the agent's replicas and devices, and at its KV node."""

    def __init__(
        self, settings: AgentSettings, ledger: DeviceLedger, replicas: Mapping[ReplicaId, Replica], kv: KvDesk
    ) -> None:
        self._settings = settings
        self._ledger = ledger
        self._kv = kv
        self._replicas = replicas

    def of(self, command: m.WorkerCommand) -> str:
        """Why a command cannot be applied; empty when it can."""
        match command:
            case m.LoadModel():
                return self._load(command)
            case m.DrainReplica():
                return self._drain(command)
            case m.UnloadReplica():
                return self._unload(command)
            case m.SetConcurrency():
                return self._concurrency(command)
            case m.SleepReplica():
                return self._sleep(command)
            case m.WakeReplica():
                return self._wake(command)
            case m.ResizeKv():
                return self._resize(command)
            case m.EvictKv() | m.MigrateKv():
                return self._kv.refusal(command)
            case _:
                assert_never(command)

    def _load(self, command: m.LoadModel) -> str:
        record = command.record
        devices = (command.device, *command.peers)
        refusal = self._ledger.cannot_span(record.name, devices, record.gpus)
        if refusal:
            return refusal
        if record.engine_type not in self._settings.engines:
            return f"engine {record.engine_type.value} is not offered by this worker"
        if not is_token(command.replica_name) or len(command.replica_name) > 48:
            return "replica_name: use 1 to 48 letters, digits, '-' or '_'"
        alive = (replica for replica in self._replicas.values() if replica.process is not Process.GONE)
        if any(base_name(replica.replica) == command.replica_name for replica in alive):
            return f"replica_name {command.replica_name}: such a replica is here already"
        if not 0 < command.timeout_s <= LOAD_TIMEOUT_S_MAX:
            return f"timeout_s {command.timeout_s}: use more than 0 and at most {LOAD_TIMEOUT_S_MAX:g}"
        if len(self._replicas) >= REPLICAS_MAX:
            return f"{REPLICAS_MAX} replicas are here already"
        if record.budget_bytes < 0:
            return f"budget_bytes {record.budget_bytes}: must not be negative"
        return self._ledger.cannot_charge(record.name, devices, record.budget_bytes)

    def _drain(self, command: m.DrainReplica) -> str:
        replica = self._replicas.get(command.replica)
        if replica is None:
            return f"replica {command.replica} is not here"
        if not 0 <= command.timeout_s <= DRAIN_TIMEOUT_S_MAX:
            return f"timeout_s {command.timeout_s}: use 0 to {DRAIN_TIMEOUT_S_MAX:g}"
        if replica.state not in SERVING_STATES or replica.process is not Process.RUNNING:
            return f"replica {command.replica} is {self._condition(replica)}; only a ready one can drain"
        return ""

    def _unload(self, command: m.UnloadReplica) -> str:
        replica = self._replicas.get(command.replica)
        if replica is None:
            return f"replica {command.replica} is not here"
        harmless = replica.drained or replica.process is Process.QUEUED or replica.state is m.ReplicaState.FAILED
        if not (command.force or harmless or replica.ending):
            return f"replica {command.replica} is {self._condition(replica)} and has not drained; drain it or use force"
        return ""

    def _concurrency(self, command: m.SetConcurrency) -> str:
        replica = self._replicas.get(command.replica)
        if replica is None:
            return f"replica {command.replica} is not here"
        if replica.state is not m.ReplicaState.READY or replica.process is not Process.RUNNING:
            return f"replica {command.replica} is {self._condition(replica)}; only a ready one takes this"
        if not 1 <= command.slots <= replica.engine_slots:
            return f"slots {command.slots}: this engine takes 1 to {replica.engine_slots}"
        return ""

    def _resize(self, command: m.ResizeKv) -> str:
        replica = self._replicas.get(command.replica)
        if replica is None:
            return f"replica {command.replica} is not here"
        if replica.state is not m.ReplicaState.READY or replica.process is not Process.RUNNING:
            return f"replica {command.replica} is {self._condition(replica)}; only a ready one takes this"
        if not replica.resizes_kv:
            return "resize-kv is not offered by this engine"
        if replica.change is not None:
            return f"replica {command.replica} is being changed"
        if command.kv_bytes <= 0:
            return f"kv_bytes {command.kv_bytes}: must be positive"
        budget_bytes = with_kv(replica.record, command.kv_bytes).budget_bytes
        return self._ledger.cannot_change(replica.replica, replica.record.name, replica.devices, budget_bytes)

    def _sleep(self, command: m.SleepReplica) -> str:
        replica = self._replicas.get(command.replica)
        if replica is None:
            return f"replica {command.replica} is not here"
        if not replica.sleeps:
            return "sleep-replica is not offered by this engine"
        if replica.process is not Process.RUNNING or not replica.drained or replica.state is not m.ReplicaState.DRAINING:
            return f"replica {command.replica} is {self._condition(replica)} and has not drained; drain it first"
        return f"replica {command.replica} is being changed" if replica.change is not None else ""

    def _wake(self, command: m.WakeReplica) -> str:
        replica = self._replicas.get(command.replica)
        if replica is None:
            return f"replica {command.replica} is not here"
        if not replica.sleeps:
            return "wake-replica is not offered by this engine"
        if replica.process is not Process.RUNNING or replica.state is not m.ReplicaState.ASLEEP or replica.wakes:
            return f"replica {command.replica} is {self._condition(replica)}; only one that sleeps can wake"
        budget_bytes = replica.record.budget_bytes
        return self._ledger.cannot_change(replica.replica, replica.record.name, replica.devices, budget_bytes)

    @staticmethod
    def _condition(replica: Replica) -> str:
        if replica.process in (Process.STOPPING, Process.KILLED):
            return "ending"
        return "queued" if replica.process is Process.QUEUED else replica.state.value
