"""How long the scheduler's core takes to decide: its own events at the size of a big pool, on one core, no bus.

The pool is 125 workers of 8 GPUs with 200 models and about 1,000 replicas; every 100 ms each worker reports counters that
changed, each gateway its demand, and the core ticks. A *tick* is the step that decides; a *round* is everything that 100 ms
bring. Times are of the thread's CPU, so that other processes do not count; they belong to the machine all the same.
"""

from __future__ import annotations

import gc
import time
from dataclasses import dataclass

import msgspec

from broker.core.plan.policy import Decision, Policy, PoolView
from broker.core.pool.events import (
    BeatSeen,
    BusRoundTripMade,
    CommandAnswered,
    IngressReported,
    LeadershipGained,
    OperationSeen,
    PublishDigest,
    RegistryLoaded,
    SchedulerCommand,
    SchedulerEvent,
    SchedulerSettings,
    SendCommand,
    Ticked,
    WorkerReported,
)
from broker.core.scheduler import SchedulerCore
from profiles.budget import with_kv
from subjects.ids import DeploymentKey, DeviceId, IngressId, ModelHash, ReplicaId, WorkerId
from subjects.messages import (
    CommandOutcome,
    CommandReply,
    DeviceKind,
    DeviceReport,
    EngineType,
    IngressTelemetry,
    Lane,
    LoadModel,
    ModelDemand,
    ModelRecord,
    OperationEnded,
    ReplicaReport,
    ReplicaState,
    ResizeKv,
    SetConcurrency,
    SlaClass,
    StepCosts,
    UnloadReplica,
    WorkerSnapshot,
)

GB = 1_000_000_000
DEVICE_TYPE = "h100-80gb"
ROUND_S = 0.1
WARM_ROUNDS = 20
COSTS = StepCosts(
    prefill_token_s=0.0226e-3,
    prefill_token2_s=2e-10,
    step_const_s=8.8e-3,
    step_request_s=0.098e-3,
    step_context_token_s=6.5e-8,
)
"""An 8B model on an H100 (ops/simulator)."""


@dataclass
class Onlooker:
    """A policy that looks and does nothing: what is measured beside it is the scheduler alone."""

    name: str = "onlooker"
    wakes_cold_models: bool = True
    looks: int = 0

    def decide(self, now_s: float, view: PoolView) -> Decision:
        """Nothing to do."""
        self.looks += 1
        return Decision()


@dataclass(slots=True)
class _Worker:
    worker: WorkerId
    devices: tuple[DeviceId, ...]
    replicas: dict[ReplicaId, ReplicaReport]
    sequence: int = 0

    def snapshot(self) -> WorkerSnapshot:
        self.sequence += 1
        return WorkerSnapshot(
            worker=self.worker,
            sequence=self.sequence,
            epoch_seen=1,
            engines=(EngineType.SIMULATED,),
            devices=tuple(
                DeviceReport(
                    device=device,
                    kind=DeviceKind.GPU,
                    memory_bytes=72 * GB,
                    reserved_bytes=sum(r.budget_bytes for r in self.replicas.values() if r.device == device),
                    device_type=DEVICE_TYPE,
                    link="nvlink",
                    busy_s=self.sequence * ROUND_S / 2,
                )
                for device in self.devices
            ),
            replicas=tuple(self.replicas.values()),
        )


class BigPool:
    """A pool whose agents do at once what they are told, and whose demand moves from round to round."""

    def __init__(
        self,
        policy: Policy | None,
        *,
        workers: int = 125,
        devices_per_worker: int = 8,
        models: int = 200,
        gateways: int = 4,
        cold_models: int = 10,
    ) -> None:
        self.now_s = 1000.0
        self.core = SchedulerCore(SchedulerSettings(models_per_device_max=4), policy)
        self.models = [_model(number) for number in range(models)]
        self.records = {model.deployment: model for model in self.models}
        self.gateways = [IngressId(f"gw-{number}-00000000aa") for number in range(gateways)]
        self.sequence = 0
        self.commands = 0
        self.digests = 0
        self._cold = cold_models
        self._loads = 0
        self.workers: dict[WorkerId, _Worker] = {}
        served = max(1, models - cold_models)
        for number in range(workers):
            worker = WorkerId(f"w{number:03d}-00000000aa")
            there = _Worker(worker, tuple(DeviceId(f"gpu{index}") for index in range(devices_per_worker)), {})
            for index, device in enumerate(there.devices):
                at = number * devices_per_worker + index
                model = self.models[(at * at) % served]
                replica = ReplicaId(f"{model.name}-0-{at}-00000000aa")
                there.replicas[replica] = _replica(replica, model.deployment, device, model.budget_bytes)
            self.workers[worker] = there
        self.step(BusRoundTripMade())
        self.step(RegistryLoaded(tuple(self.models)))
        self.step(LeadershipGained(1))

    def step(self, event: SchedulerEvent) -> float:
        """One event and what follows of it; returns the seconds that the core took for it."""
        began_s = time.thread_time()
        commands = self.core.step(self.now_s, event)
        took_s = time.thread_time() - began_s
        for command in commands:
            self._do(command)
        return took_s

    def _do(self, command: SchedulerCommand) -> None:
        if isinstance(command, PublishDigest):
            self.digests += 1
        if not isinstance(command, SendCommand):
            return
        self.commands += 1
        order, worker = command.command, self.workers[command.worker]
        reply = CommandReply(operation=order.operation, outcome=CommandOutcome.ACCEPTED, epoch_seen=1)
        self.step(CommandAnswered(reply))
        replica: ReplicaId | None = None
        if isinstance(order, LoadModel):
            self._loads += 1
            replica = ReplicaId(f"{order.replica_name}-{self._loads:010x}")
            record = order.record
            loaded = _replica(replica, record.deployment, order.device, record.budget_bytes)
            worker.replicas[replica] = msgspec.structs.replace(loaded, kv_bytes=record.kv_bytes)
        elif isinstance(order, UnloadReplica):
            worker.replicas.pop(order.replica, None)
        elif isinstance(order, SetConcurrency | ResizeKv) and order.replica in worker.replicas:
            worker.replicas[order.replica] = self._changed(worker.replicas[order.replica], order)
        ended = OperationEnded(worker=command.worker, operation=order.operation, replica=replica)
        self.step(OperationSeen(ended))

    def _changed(self, report: ReplicaReport, order: SetConcurrency | ResizeKv) -> ReplicaReport:
        if isinstance(order, SetConcurrency):
            return msgspec.structs.replace(report, slots=order.slots)
        budget_bytes = with_kv(self.records[report.deployment], order.kv_bytes).budget_bytes
        return msgspec.structs.replace(report, kv_bytes=order.kv_bytes, budget_bytes=budget_bytes)

    def round(self, number: int) -> tuple[float, float]:
        """What 100 ms bring; returns the seconds of the tick, and of all."""
        self.now_s += ROUND_S
        total_s = self.step(BusRoundTripMade())
        for at, worker in enumerate(self.workers.values()):
            total_s += self.step(BeatSeen(worker.worker, 1))
            for replica, report in list(worker.replicas.items()):
                running = (number + at) % 8
                free = report.kv_pages - running * 100
                worker.replicas[replica] = msgspec.structs.replace(report, running=running, kv_pages_free=free)
            total_s += self.step(WorkerReported(worker.snapshot()))
        self.sequence += 1
        for at, gateway in enumerate(self.gateways):
            rows = tuple(self._demand(number, at, index) for index in range(len(self.models)))
            telemetry = IngressTelemetry(ingress=gateway, sequence=self.sequence, demand=rows)
            total_s += self.step(IngressReported(telemetry))
        tick_s = self.step(Ticked(self.now_s))
        return tick_s, total_s + tick_s

    def _demand(self, number: int, gateway: int, index: int) -> ModelDemand:
        # The last models have no replica and wait in turns, a tenth of the others is idle, the rest has queues at times.
        cold = index >= len(self.models) - self._cold or index % 10 == 9
        waits = (number + index) % 97 == 0 or (cold and (number // 20 + index) % 5 == 0)
        return ModelDemand(
            model_hash=self.models[index].model_hash,
            deployment=self.models[index].deployment,
            sla_class=SlaClass.SILVER,
            lane=Lane.SMALL,
            arrived=0 if cold else 1 + index % 3,
            waiting=1 if waits else 0,
            running=0 if cold else 2 + (number + gateway) % 3,
            oldest_wait_s=0.5 if waits else 0.0,
            arrived_lengths=(1, index % 3, 0),
            arrived_input_tokens=(200, 1000 * (index % 3), 0),
            arrived_output_tokens=(200, 200 * (index % 3), 0),
            finished=1,
            within_slo=1,
        )


def _model(number: int) -> ModelRecord:
    large = number % 3 == 2
    weights, kv = (29 * GB, 30 * GB) if large else (16 * GB, 30 * GB)
    return ModelRecord(
        name=f"m{number:03d}",
        model_hash=ModelHash(f"{number:064x}"),
        deployment=DeploymentKey(f"{number:064x}"),
        weights_hash="0" * 64,
        engine_type=EngineType.SIMULATED,
        source="",
        weights_bytes=weights,
        kv_bytes_per_token=131072,
        kv_bytes=kv,
        budget_bytes=weights + kv,
        max_context_len=8192,
        max_num_seqs=256,
        max_replicas=1024,
        costs={DEVICE_TYPE: COSTS},
    )


def _replica(replica: ReplicaId, model: DeploymentKey, device: DeviceId, budget_bytes: int) -> ReplicaReport:
    return ReplicaReport(
        replica=replica,
        model_hash=ModelHash(model),
        deployment=model,
        device=device,
        state=ReplicaState.READY,
        budget_bytes=budget_bytes,
        slots=256,
        kv_pages=10_000,
        kv_pages_free=10_000,
        kv_bytes=30 * GB,
        state_s=100.0,
    )


def measure_ticks(
    policy: Policy | None = None,
    *,
    rounds: int = 200,
    workers: int = 125,
    devices_per_worker: int = 8,
    models: int = 200,
) -> dict[str, float]:
    """Quantiles of the times of ticks and rounds, in milliseconds."""
    pool = BigPool(policy, workers=workers, devices_per_worker=devices_per_worker, models=models)
    for number in range(WARM_ROUNDS):
        pool.round(number)
    gc.collect()
    commands = pool.commands
    times = [pool.round(WARM_ROUNDS + number) for number in range(rounds)]
    ticks, totals = sorted(tick for tick, _ in times), sorted(total for _, total in times)
    return {
        "workers": workers,
        "devices": workers * devices_per_worker,
        "models": models,
        "replicas": len(pool.core.pool.replicas),
        "rounds": rounds,
        "commands": pool.commands - commands,
        "tick_p50_ms": _ms(ticks, 0.50),
        "tick_p99_ms": _ms(ticks, 0.99),
        "tick_max_ms": _ms(ticks, 1.0),
        "round_p50_ms": _ms(totals, 0.50),
        "round_p99_ms": _ms(totals, 0.99),
    }


def _ms(ordered: list[float], share: float) -> float:
    return round(1000 * ordered[min(len(ordered) - 1, int(share * len(ordered)))], 3)


def main() -> None:
    """Prints the measurements as JSON."""
    from broker.core.plan.coordinator import Coordinator

    found = {
        "base rules": measure_ticks(None),
        "with a policy's view": measure_ticks(Onlooker()),
        "with the coordinator": measure_ticks(Coordinator()),
        "64 devices, 5 models": measure_ticks(Onlooker(), workers=8, models=5),
    }
    print(msgspec.json.format(msgspec.json.encode(found), indent=2).decode())  # what it is for


if __name__ == "__main__":
    main()
