"""The arithmetic of room: what is free on each device of a worker now, and once all that is under way has ended."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

import msgspec

from broker.core.pool.members import COMING, Replica
from subjects.ids import DeploymentKey, DeviceId, ReplicaId, WorkerId
from subjects.messages import DeviceReport, WorkerSnapshot


class Reservation(msgspec.Struct, frozen=True):
    """Room promised to a replica that is not listed yet; ``sent`` once its load command went out.

    One with ``until_s`` has outlived its transaction: the agent may hold that room, and its next report will tell.
    """

    worker: WorkerId
    devices: tuple[DeviceId, ...]
    """All that it will span, the leading one first."""
    replica_name: str
    deployment: DeploymentKey
    budget_bytes: int
    """On each device."""
    sent: bool = False
    until_s: float | None = None


class Room(msgspec.Struct, frozen=True):
    """The arithmetic of one device at one moment."""

    replicas: tuple[Replica, ...]
    """All that is listed there, in order of id."""
    promised: tuple[Reservation, ...]
    """Room that is promised and not yet taken."""
    charged_bytes: int
    """What replicas take now, with load commands that went out and what the agent holds back besides."""
    free_now_bytes: int
    """Room for a load that starts this instant."""
    block_now_bytes: int
    """Of ``free_now_bytes``: the largest block."""
    free_planned_bytes: int
    """Room once all running transactions have ended as planned: who leaves is gone, who was promised room has it."""
    largest_free_bytes: int
    """Of ``free_planned_bytes``: the largest block that one replica can surely get."""
    loads_running: int
    """Loads under way: they are serial."""
    loads_coming: int
    """Loads under way or promised."""
    models: tuple[DeploymentKey, ...]
    """Models listed or promised there."""
    held_back_bytes: int
    """What the agent holds back beside what it lists."""


def rooms_of(
    snapshot: WorkerSnapshot,
    replicas: Iterable[Replica],
    promised: Iterable[Reservation],
    leaving: Collection[ReplicaId],
    resized: Mapping[ReplicaId, tuple[int, int]],
) -> dict[DeviceId, Room]:
    """The rooms of all devices of a worker.

    ``replicas`` is what is listed there, ``promised`` what is not listed yet, ``leaving`` who leaves; ``resized`` has for
    each replica whose charge changes the least that it surely has, and what it is meant to have.
    """
    listed: dict[DeviceId, list[Replica]] = {device.device: [] for device in snapshot.devices}
    reserved: dict[DeviceId, list[Reservation]] = {device.device: [] for device in snapshot.devices}
    in_report = dict.fromkeys(listed, 0)
    for replica in sorted(replicas, key=lambda r: r.report.replica):
        for device in replica.devices:
            if device in listed:
                listed[device].append(replica)
    for report in snapshot.replicas:
        for device in (report.device, *report.peers):
            if device in listed:
                in_report[device] += report.budget_bytes
    for reservation in promised:
        for device in reservation.devices:
            if device in listed:
                reserved[device].append(reservation)
    return {
        report.device: _room(
            report, listed[report.device], reserved[report.device], in_report[report.device], leaving, resized
        )
        for report in snapshot.devices
    }


def _room(
    report: DeviceReport,
    replicas: list[Replica],
    promised: list[Reservation],
    in_report: int,
    leaving: Collection[ReplicaId],
    resized: Mapping[ReplicaId, tuple[int, int]],
) -> Room:
    charged = held_back = max(0, report.reserved_bytes - in_report)
    unsent = leaves = growth = loads = 0
    for replica in replicas:
        budget = replica.report.budget_bytes
        if replica.report.replica in resized:
            sure, planned = resized[replica.report.replica]
        else:
            sure = planned = budget
        now = max(budget, sure)
        charged += now
        if replica.report.replica in leaving:
            leaves += now
        else:
            growth += planned - now
        loads += replica.report.state in COMING and not replica.dead
    for reservation in promised:
        if reservation.sent:
            charged += reservation.budget_bytes
            loads += 1
        else:
            unsent += reservation.budget_bytes
    free_now = report.memory_bytes - charged
    free_planned = free_now - unsent + leaves - growth
    block_now, largest = free_now, free_planned
    if report.contiguous_free_bytes is not None and replicas:
        # Nobody knows how freed blocks join with free ones: the largest of each is sure. An empty device is one block.
        freed = [r.report.budget_bytes for r in replicas if r.report.replica in leaving]
        if len(freed) < len(replicas):
            run = report.contiguous_free_bytes - sum(r.budget_bytes for r in promised)
            largest = min(free_planned, max([run, *freed]))
        block_now = min(free_now, report.contiguous_free_bytes - sum(r.budget_bytes for r in promised if r.sent))
    return Room(
        tuple(replicas),
        tuple(promised),
        charged,
        free_now,
        block_now,
        free_planned,
        largest,
        loads,
        loads + sum(not r.sent for r in promised),
        tuple([r.report.deployment for r in replicas] + [r.deployment for r in promised]),
        held_back,
    )
